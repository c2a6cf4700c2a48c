"""Which layers are here: loading and dropping them while sessions go on, and what is left to these."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from p2pllm.errors import ModelError
from p2pllm.execution.checkpoint import Checkpoint
from p2pllm.execution.engine import Engine
from p2pllm.execution.kv_budget import KvBudget
from p2pllm.execution.reservations import Reservations
from p2pllm.execution.speed import Speed
from p2pllm.execution.types import runs_of
from p2pllm.execution.work import StepTimes

__all__ = ["Holdings"]


class Holdings:
    """The layers of a checkpoint that an engine has ready. For the event loop's thread."""

    def __init__(self, checkpoint: Checkpoint, engine: Engine, kv: Reservations, budget: KvBudget) -> None:
        """``kv`` gets the blocks that ``budget`` makes of the memory."""
        self.speed = Speed()
        self.weight_bytes = 0
        self._checkpoint, self._engine, self._kv, self._budget = checkpoint, engine, kv, budget
        self._held: frozenset[int] = frozenset()
        self._changing = asyncio.Lock()
        self._closing = False

    @property
    def slices(self) -> tuple[tuple[int, int], ...]:
        """The runs of layers [start, end) that are ready, apart from each other, in order."""
        return runs_of(self._held)

    @property
    def width(self) -> int:
        """What a block in all of them counts as, see `KvBudget`; at least 1."""
        return max(1, self._budget.width(self._held))

    def holds(self, start: int, end: int) -> bool:
        """Whether all layers [start, end) are ready."""
        return start < end and self._held.issuperset(range(start, end))

    async def load(
        self, start: int, end: int, kv_bytes: int, progress: Callable[[int, int], None] | None
    ) -> None:
        """Add layers [start, end), see `Executor.load`."""
        async with self._changing:
            if self._closing:
                raise ModelError("loading was stopped")
            before = self._kv.pool.total
            if self._held and kv_bytes // self._budget.block_bytes < before:
                self._resize(kv_bytes // self._budget.block_bytes)
                await self._engine.shorten(self._kv.pool.heights())
            try:
                await self._add(start, end, kv_bytes, progress)
            except BaseException:
                self._resize(before)
                await self._engine.retain(self._held, self._kv.pool.heights())
                raise
            self.weight_bytes = self._engine.weight_bytes()

    async def drop(self, start: int, end: int, kv_bytes: int, leave: Callable[[], None]) -> None:
        """Free layers [start, end), see `Executor.drop`; ``leave`` ends the sessions that use them."""
        async with self._changing:
            if self._closing:
                return  # which frees everything
            dropped = self._held & frozenset(range(start, end))
            self._held -= dropped
            leave()
            self._kv.forget(dropped)
            if self._checkpoint.layers - 1 not in self._held:
                self.speed.begin_head(0.0)
            await self._engine.retain(self._held, self._kv.pool.heights())
            self.weight_bytes = self._engine.weight_bytes()
            if self._budget.block_bytes:
                self._resize(kv_bytes // self._budget.block_bytes)

    def stop(self) -> None:
        """Let nothing be loaded or dropped any more, and what is being read fail with `ModelError`."""
        self._closing = True
        self._engine.stop_reading()

    async def close(self) -> None:
        """Close the engine, once nothing changes any more."""
        async with self._changing:
            await self._engine.close()

    async def _add(
        self, start: int, end: int, kv_bytes: int, progress: Callable[[int, int], None] | None
    ) -> None:
        await self._engine.read(start, end, progress)
        added = frozenset(range(start, end)) - self._held
        held = self._held | added
        times = StepTimes()
        if added:
            tried = await self._engine.try_out(start, end)
            times = tried.times
            self._budget.learn(tried.token_bytes)
        blocks = self._budget.blocks(held, kv_bytes)
        if added:
            self._kv.windows |= {layer: tried.windows.get(layer) for layer in added}
            self._kv.pool.costs = self._budget.costs
        if not self._held:
            self.speed.begin_layers(times.layer_s or 0.0)
        if self._checkpoint.layers - 1 in added:
            self.speed.begin_head(times.head_s or 0.0)
        self._held = held
        self._resize(blocks)

    def _resize(self, blocks: int) -> None:
        self._kv.resize(blocks, self._budget.width(self._held))
        self._engine.store.most_bytes = blocks * self._budget.block_bytes
