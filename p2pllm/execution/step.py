"""One step of the executor: any number of sessions' waiting work, in as few forward passes as possible."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate

import structlog
import torch
from torch import Tensor

from p2pllm.errors import P2PLLMError, RequestError, SessionError
from p2pllm.execution.attention import Segment
from p2pllm.execution.blocks import outputs_layer
from p2pllm.execution.kv import SessionCache
from p2pllm.execution.outputs import keep_outputs, to_activation
from p2pllm.execution.sampler import GREEDY_BELOW, sample, uniform
from p2pllm.execution.stage import Stage
from p2pllm.execution.types import Activation, StageOutput
from p2pllm.execution.work import Outcome, StepTimes, Work

__all__ = ["run_step", "settle"]

log = structlog.get_logger()


@torch.inference_mode()
def run_step(stage: Stage, works: Sequence[Work]) -> tuple[list[Outcome], StepTimes]:
    """Run all ``works``, at most one of each session, and give each its outcome. Raises nothing of ours.

    Their caches are in one store. Work that cannot be run fails alone: the sessions beside it do not notice.
    """
    began = time.perf_counter()
    outcomes: dict[int, Outcome] = {}
    groups: dict[tuple[int, int, bool], list[tuple[int, Work, Tensor]]] = {}
    # Those that decode side by side, and those of much the same length, share calls of attention.
    order = sorted(enumerate(works), key=lambda item: (item[1].count > 1, item[1].position))
    for index, work in order:
        try:
            work.cache.catch_up()
            inputs = _inputs(stage, work)
        except P2PLLMError as error:
            outcomes[index] = error
        except Exception as error:
            outcomes[index] = _crashed(work, error)
        else:
            group = (work.start, work.end, stage.is_long(work.position + work.count))
            groups.setdefault(group, []).append((index, work, inputs))
    times = StepTimes()
    for members in groups.values():
        results = _run_group(
            stage, [work for _, work, _ in members], [inputs for *_, inputs in members], times
        )
        outcomes |= {index: result for (index, *_), result in zip(members, results, strict=True)}
    times.step_s = time.perf_counter() - began
    return [outcomes[index] for index in range(len(works))], times


@torch.inference_mode()
def settle(cache: SessionCache) -> None:
    """Make the copies that a session still needs."""
    cache.catch_up()


def _run_group(stage: Stage, works: list[Work], inputs: list[Tensor], times: StepTimes) -> list[Outcome]:
    try:
        return _forward(stage, works, inputs, times)
    except Exception as error:  # out of memory, mostly; whatever it is, the peer goes on for the others
        if len(works) > 1:
            return [
                _run_group(stage, [work], [rows], times)[0] for work, rows in zip(works, inputs, strict=True)
            ]
        return [_crashed(works[0], error)]


def _crashed(work: Work, error: Exception) -> SessionError:
    log.exception("forward_failed", layers=f"{work.start}:{work.end}", rows=work.count)
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return SessionError(f"the forward pass failed: {reason}")


def _forward(stage: Stage, works: list[Work], inputs: list[Tensor], times: StepTimes) -> list[Outcome]:
    began = time.perf_counter()
    start, end = works[0].start, works[0].end
    for work in works:
        work.cache.length = min(work.cache.length, work.position)
    segments = [Segment(work.cache, work.position, work.count, work.tables) for work in works]
    rows = inputs[0] if len(inputs) == 1 else torch.cat(inputs)
    hidden = stage.forward(segments, rows, start, end)
    stage.synchronize()
    kept = outputs_layer(end, stage.layers)
    is_final = kept is None
    if kept is not None:
        keep_outputs(works, hidden, kept)
    outcomes = _sample_later(works) if is_final else _hand_on(works, hidden.cpu())
    done = time.perf_counter()
    is_decode = all(work.count == 1 for work in works)
    if is_decode:
        times.layer_s = (done - began) / (end - start)
    if is_final and any(work.sampling for work in works):
        outcomes = _sample(stage, works, hidden)
        if is_decode:
            times.head_s = time.perf_counter() - done
    for work, outcome in zip(works, outcomes, strict=True):
        if not isinstance(outcome, P2PLLMError):
            work.cache.length = work.position + work.count
    return outcomes


def _sample_later(works: Sequence[Work]) -> list[Outcome]:
    return [StageOutput(None, None) for _ in works]


def _hand_on(works: Sequence[Work], hidden: Tensor) -> list[Outcome]:
    """Hidden states for the next stage."""
    all_rows = to_activation(hidden)
    ends = list(accumulate(work.count for work in works))
    parts = [all_rows.rows(end - work.count, end) for work, end in zip(works, ends, strict=True)]
    are_finite = all_rows.is_finite
    return [
        StageOutput(part, None)
        if are_finite or part.is_finite
        else SessionError("the layers gave values that are not finite: their dtype is not usable here")
        for part in parts
    ]


def _sample(stage: Stage, works: Sequence[Work], hidden: Tensor) -> list[Outcome]:
    outcomes = _sample_later(works)
    last_rows, wanting, end = [], [], 0
    for index, work in enumerate(works):
        end += work.count
        if work.sampling is not None:
            last_rows.append(end - 1)
            wanting.append((index, work, work.sampling))
    logits = stage.logits(hidden if len(last_rows) == len(hidden) else hidden[last_rows])
    best = logits.max(dim=-1)
    are_finite, tokens = torch.isfinite(best.values).tolist(), best.indices.tolist()
    for row, (index, work, sampling) in enumerate(wanting):
        try:
            if sampling.temperature < GREEDY_BELOW and are_finite[row]:
                outcomes[index] = StageOutput(None, tokens[row])
            else:
                chance = uniform(sampling.seed, work.position + work.count)
                outcomes[index] = StageOutput(None, sample(logits[row], sampling, chance))
        except SessionError as error:
            outcomes[index] = error
        except Exception as error:
            outcomes[index] = _crashed(work, error)
    return outcomes


def _inputs(stage: Stage, work: Work) -> Tensor:
    """The rows, on the CPU; raises `SessionError` if rows before them failed, `RequestError` for NaN."""
    if work.position > work.cache.length:
        raise SessionError(f"position {work.position} is past the {work.cache.length} tokens that are cached")
    if not isinstance(work.inputs, Activation):
        return torch.tensor(work.inputs, dtype=torch.int64)
    if not work.inputs.is_finite:
        raise RequestError("the hidden states hold values that are not finite")
    hidden = torch.frombuffer(bytearray(work.inputs.data), dtype=getattr(torch, work.inputs.dtype))
    return hidden.view(work.inputs.shape).to(stage.dtype)
