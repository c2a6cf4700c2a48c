"""One step of the executor: any number of sessions' waiting work, in as few forward passes as possible."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
import torch
from torch import Tensor

from ..errors import P2PLLMError, RequestError, SessionError
from .attention import Segment
from .kv import SessionCache
from .sampler import sample, uniform
from .stage import Stage
from .types import Activation, SamplingParams, StageOutput

__all__ = ["Outcome", "StepTimes", "Work", "run_step"]

log = structlog.get_logger()

Outcome = StageOutput | P2PLLMError


@dataclass(frozen=True, slots=True)
class Work:
    """One session's part of a step: ``inputs`` go in at ``position``, through layers [start, end)."""

    cache: SessionCache
    start: int
    end: int
    position: int
    inputs: Sequence[int] | Activation
    sampling: SamplingParams | None
    """Not None where the last row's token is wanted."""

    @property
    def count(self) -> int:
        """Rows of ``inputs``."""
        return self.inputs.shape[0] if isinstance(self.inputs, Activation) else len(self.inputs)


@dataclass(slots=True)
class StepTimes:
    """Decode times in seconds, of forward passes that held nothing but single rows."""

    layer_s: float | None = None
    head_s: float | None = None


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


def _run_group(stage: Stage, works: list[Work], inputs: list[Tensor], times: StepTimes) -> list[Outcome]:
    try:
        return _forward(stage, works, inputs, times)
    except RuntimeError as error:  # torch raises these, out of memory among them
        if len(works) > 1:
            return [
                _run_group(stage, [work], [rows], times)[0] for work, rows in zip(works, inputs, strict=True)
            ]
        log.exception("forward_failed", layers=f"{works[0].start}:{works[0].end}", rows=works[0].count)
        return [SessionError(f"the forward pass failed: {str(error).splitlines()[0]}")]


def _forward(stage: Stage, works: list[Work], inputs: list[Tensor], times: StepTimes) -> list[Outcome]:
    began = time.perf_counter()
    start, end = works[0].start, works[0].end
    segments = [Segment(work.cache, work.position, work.count) for work in works]
    rows = inputs[0] if len(inputs) == 1 else torch.cat(inputs)
    hidden = stage.forward(segments, rows, start, end)
    stage.synchronize()
    is_final = stage.is_last and end == stage.end
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
