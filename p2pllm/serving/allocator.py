"""Brings what the executor holds to what the allocation says: loads and drops layers while sessions go on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import structlog

from p2pllm.errors import ModelError
from p2pllm.execution import Executor, runs_of
from p2pllm.scheduling import Slice
from p2pllm.swarm import Allocation, Drop, Load, PeerState

__all__ = ["Allocator"]

STEP_S = 0.25

log = structlog.get_logger()


class Allocator:
    """Owner of the changes of what this peer holds. ``run`` ends only by cancellation."""

    def __init__(
        self,
        *,
        allocation: Allocation,
        executor: Executor,
        peers: Callable[[], Sequence[PeerState]],
        leaderless_s: Callable[[], float],
        kv_room: Callable[[Sequence[tuple[int, int]]], int],
        changed: Callable[[], None],
        hand_over: Callable[[range, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``peers`` is the view, ``leaderless_s`` how long there has been no leader; ``kv_room`` says how
        many bytes KV caches get beside some slices; ``changed`` is told when the spans are others than
        before, and ``hand_over`` of layers that sessions should leave, and why.
        """
        self.loading: float | None = None
        """Share of the weights that are here of what is being loaded now."""
        self._allocation = allocation
        self._executor = executor
        self._peers = peers
        self._leaderless_s = leaderless_s
        self._kv_room = kv_room
        self._changed = changed
        self._hand_over = hand_over
        self._clock = clock
        self._wake = asyncio.Event()
        self._empty = asyncio.Event()
        self._turn = asyncio.Lock()

    async def empty(self) -> None:
        """Wait until this peer holds and loads nothing."""
        await self._empty.wait()

    def soon(self) -> None:
        """There may be something to do: a plan has come, or the operator wants something."""
        self._wake.set()

    async def run(self) -> None:
        """Look what is to do, and do it, for ever. Only one change is made at a time."""
        spans = self._allocation.spans()
        async with asyncio.TaskGroup() as tasks:
            while True:
                for action in self._allocation.step(
                    self._clock(), self._peers(), self._executor.sessions, self._leaderless_s()
                ):
                    tasks.create_task(self._act(action))
                if spans != (spans := self._allocation.spans()):
                    self._changed()
                for span in spans:
                    if span.state == "draining":
                        self._hand_over(range(span.start, span.end), "it is about to drop its layers")
                (self._empty.clear if spans else self._empty.set)()
                try:
                    async with asyncio.timeout(STEP_S):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                self._wake.clear()

    async def _act(self, action: Load | Drop) -> None:
        async with self._turn:
            await (self._load if isinstance(action, Load) else self._drop)(action.slice)
        self._wake.set()

    async def _load(self, piece: Slice) -> None:
        layers, began = f"{piece.start}:{piece.end}", self._clock()
        log.info("loading", layers=layers)
        room = self._kv_room(runs_of(self._held() | set(range(piece.start, piece.end))))
        try:
            await self._executor.load(piece.start, piece.end, kv_bytes=room, progress=self._progress())
        except ModelError as error:
            log.warning("loading_failed", layers=layers, reason=str(error))
            self._allocation.failed(piece, self._clock())
        else:
            log.info("ready", layers=layers, seconds=round(self._clock() - began, 2))
            self._allocation.loaded(piece)
        finally:
            self.loading = None

    async def _drop(self, piece: Slice) -> None:
        room = self._kv_room(runs_of(self._held() - set(range(piece.start, piece.end))))
        await self._executor.drop(piece.start, piece.end, kv_bytes=room)
        log.info("dropped", layers=f"{piece.start}:{piece.end}")
        self._allocation.dropped(piece)

    def _progress(self) -> Callable[[int, int], None]:
        """Notes how far a load is, and logs each further eighth of it."""
        logged = 0

        def progress(done: int, total: int) -> None:
            nonlocal logged
            self.loading = done / max(total, 1)
            eighth = int(8 * self.loading)
            if eighth > logged:
                logged = eighth
                log.info("loading_progress", share=eighth / 8)

        return progress

    def _held(self) -> set[int]:
        return {layer for start, end in self._executor.slices for layer in range(start, end)}
