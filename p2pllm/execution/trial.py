"""Layers that have just been loaded, tried out: whether they run at all, how fast, and what they keep."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from p2pllm.errors import ModelError, P2PLLMError
from p2pllm.execution.blocks import BLOCK_TOKENS
from p2pllm.execution.kv import private_caches
from p2pllm.execution.stage import Stage
from p2pllm.execution.step import run_step
from p2pllm.execution.types import DTYPES, Activation, SamplingParams
from p2pllm.execution.work import StepTimes, TriedOut, Work

__all__ = ["Trial"]


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
        (self._cache,) = private_caches([BLOCK_TOKENS])
        self._times: list[StepTimes] = []

    def step(self) -> None:
        """Run one step, of `STEPS` in all; raises `ModelError` if the layers cannot run here."""
        position, start, end = len(self._times), self._start, self._end
        tables = self._cache.tables
        work = Work(self._cache, tables, start, end, position, self._inputs, self._sampling)
        (outcome,), times = run_step(self._stage, [work])
        if isinstance(outcome, P2PLLMError):
            raise ModelError(f"layers {start}:{end} do not run on {self._stage.device}: {outcome}")
        self._times.append(times)

    @property
    def result(self) -> TriedOut:
        """What was seen. The first step does not count: it also pays for what is made once."""
        counted = self._times[1:]
        times = StepTimes(
            median(times.step_s for times in counted),
            median(times.layer_s or 0.0 for times in counted),
            median(times.head_s or 0.0 for times in counted),
        )
        store = self._cache.store
        return TriedOut(times, store.token_bytes(range(self._start, self._end)), store.windows)
