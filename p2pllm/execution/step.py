"""One step of the executor: any number of sessions' waiting work, in as few forward passes as possible."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import structlog
import torch
from torch import Tensor

from p2pllm.errors import ModelError, P2PLLMError, RequestError, SessionError
from p2pllm.execution.attention import Segment
from p2pllm.execution.kv import BLOCK_TOKENS, SessionCache
from p2pllm.execution.sampler import sample, uniform
from p2pllm.execution.stage import Stage
from p2pllm.execution.types import DTYPES, Activation, SamplingParams, StageOutput
from p2pllm.execution.work import Outcome, StepTimes, Work

__all__ = ["Trial", "run_step"]

log = structlog.get_logger()


def run_step(stage: Stage, works: Sequence[Work]) -> tuple[list[Outcome], StepTimes]:
    """Run all ``works``, at most one of each session, and give each its outcome. Raises nothing of ours.

    Work that cannot be run fails alone: the sessions beside it do not notice.
    """
    outcomes: dict[int, Outcome] = {}
    groups: dict[tuple[int, int, bool], list[tuple[int, Work, Tensor]]] = {}
    for index, work in enumerate(works):
        try:
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
    return [outcomes[index] for index in range(len(works))], times


class Trial:
    """Decoding a little through layers [start, end), one step at a time, so that others' steps fit
    between.
    """

    STEPS = 5

    def __init__(self, stage: Stage, start: int, end: int, hidden: int) -> None:
        """``hidden`` is the width of hidden states."""
        zeros = Activation("float32", (1, hidden), bytes(hidden * DTYPES["float32"]))
        self._inputs: Sequence[int] | Activation = [0] if start == 0 else zeros
        self._sampling = SamplingParams(temperature=0) if end == stage.layers else None
        self._stage, self._start, self._end = stage, start, end
        self._cache = SessionCache(start, end, BLOCK_TOKENS)
        self._times: list[StepTimes] = []

    def step(self) -> None:
        """Run one step, of `STEPS` in all; raises `ModelError` if the layers cannot run here."""
        position, start, end = len(self._times), self._start, self._end
        work = Work(self._cache, start, end, position, self._inputs, self._sampling)
        (outcome,), times = run_step(self._stage, [work])
        if isinstance(outcome, P2PLLMError):
            raise ModelError(f"layers {start}:{end} do not run on {self._stage.device}: {outcome}")
        self._times.append(times)

    @property
    def times(self) -> StepTimes:
        """The times of a step. The first one does not count: it also pays for what is made once."""
        counted = self._times[1:]
        return StepTimes(
            median(times.layer_s or 0.0 for times in counted),
            median(times.head_s or 0.0 for times in counted),
        )

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token in one layer."""
        return self._cache.token_bytes


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
    segments = [Segment(work.cache, work.position, work.count) for work in works]
    rows = inputs[0] if len(inputs) == 1 else torch.cat(inputs)
    hidden = stage.forward(segments, rows, start, end)
    stage.synchronize()
    is_final = end == stage.layers
    outcomes: list[Outcome]
    if not is_final:
        parts = torch.split(hidden.cpu(), [work.count for work in works])
        outcomes = [StageOutput(_to_activation(part), None) for part in parts]
    done = time.perf_counter()
    is_decode = all(work.count == 1 for work in works)
    if is_decode:
        times.layer_s = (done - began) / (end - start)
    if is_final:
        outcomes = _sample(stage, works, hidden)
        if is_decode and any(work.sampling for work in works):
            times.head_s = time.perf_counter() - done
    for work in works:
        work.cache.length = work.position + work.count
    return outcomes


def _sample(stage: Stage, works: list[Work], hidden: Tensor) -> list[Outcome]:
    outcomes: list[Outcome] = [StageOutput(None, None) for _ in works]
    last_rows, wanting, end = [], [], 0
    for index, work in enumerate(works):
        end += work.count
        if work.sampling is not None:
            last_rows.append(end - 1)
            wanting.append((index, work, work.sampling))
    if wanting:
        for row, (index, work, sampling) in zip(stage.logits(hidden[last_rows]), wanting, strict=True):
            try:
                chance = uniform(sampling.seed, work.position + work.count)
                outcomes[index] = StageOutput(None, sample(row, sampling, chance))
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
    hidden = torch.frombuffer(bytearray(work.inputs.data), dtype=getattr(torch, work.inputs.dtype))
    if not torch.isfinite(hidden).all():
        raise RequestError("the hidden states hold values that are not finite")
    return hidden.view(work.inputs.shape).to(stage.dtype)


def _to_activation(hidden: Tensor) -> Activation:
    dtype = str(hidden.dtype).removeprefix("torch.")
    return Activation(dtype, tuple(hidden.shape), hidden.contiguous().view(torch.uint8).numpy().tobytes())
