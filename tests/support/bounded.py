"""What one stage needs to run by itself: a loop whose time is told, and an executor that only counts."""

from __future__ import annotations

import asyncio
from typing import Any

from p2pllm.errors import BusyError, RequestError, SessionError
from p2pllm.execution import Activation, ExecutorStats, StageOutput

__all__ = ["BLOCKS", "CONTEXT", "HIDDEN", "LAYERS", "Bounded", "Clock", "stats_of"]

LAYERS, CONTEXT, HIDDEN = 6, 64, 2
BLOCKS = 1000

Key = tuple[str, int]


class Clock(asyncio.SelectorEventLoop):
    """A loop whose time passes when it is told."""

    now = 0.0

    def time(self) -> float:
        return self.now


def stats_of(kv_blocks_free: int) -> ExecutorStats:
    """An executor that has nothing to do, with so much left of ``BLOCKS``."""
    return ExecutorStats(0.0, 0.0, 0.0, 0, 0, BLOCKS, kv_blocks_free, 0, 0, 0)


class Bounded:
    """An executor that refuses what a real one refuses, and keeps nothing but lengths."""

    def __init__(self) -> None:
        self.open: dict[Key, int] = {}
        """How many tokens each session has."""
        self.runs = 0
        self.breaks = False
        self.blocks_free = BLOCKS
        """As it says, whatever is open."""
        self.free = asyncio.Event()
        """Nothing gets done while this is not set."""
        self.free.set()
        self.spans: dict[Key, tuple[int, int]] = {}
        """Of the sessions' layers."""

    def reserve(self, key: Key, *, start: int, end: int, tokens: int, **_: Any) -> int:
        if not 0 < tokens <= CONTEXT:
            raise RequestError("out of the model's context")
        if self.breaks:
            raise BusyError("the KV cache is full")
        assert key not in self.open
        self.open[key], self.spans[key] = 0, (start, end)
        return 0

    async def run(
        self, key: Key, position: int, inputs: list[int] | Activation, *, sample: bool
    ) -> StageOutput:
        self.runs += 1
        await self._turn(key)
        rows = inputs.shape[0] if isinstance(inputs, Activation) else len(inputs)
        if position > self.open[key]:
            raise SessionError("it lacks what comes before")
        if position + rows > CONTEXT:
            raise RequestError("out of the model's context")
        self.open[key] = position + rows
        if self.spans[key][1] < LAYERS:
            return StageOutput(_hidden(rows), None)
        return StageOutput(None, (position + rows) % 10 if sample else None)

    async def outputs(self, key: Key, start: int, end: int) -> Activation:
        await self._turn(key)
        assert self.spans[key][1] < LAYERS, "the last stage keeps none"
        assert 0 <= start < end <= self.open[key]
        return _hidden(end - start)

    async def take_back(self, key: Key, position: int) -> int:
        await self._turn(key)
        self.open[key] = min(position, self.open[key])
        return self.open[key]

    def stats(self) -> ExecutorStats:
        return stats_of(self.blocks_free)

    def release(self, key: Key, prefix: bytes = b"") -> None:
        self.open.pop(key, None)
        if len(prefix) > CONTEXT:
            raise RequestError("more blocks than the context has")

    async def _turn(self, key: Key) -> None:
        await self.free.wait()
        if key not in self.open or self.breaks:
            raise SessionError("it was released, or the forward pass failed")


def _hidden(rows: int) -> Activation:
    return Activation("float32", (rows, HIDDEN), bytes(4 * rows * HIDDEN))
