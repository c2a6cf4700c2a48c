"""The executor: runs the layers that this peer holds for all sessions at once, and changes which these are.

Everything but torch's work happens on the event loop, so there are no locks around sessions, the pool and the
queue: they belong to it. A driver task hands waiting work to the engine, one step at a time, and hands out
what comes back. Work that arrives during a step is in the next one (continuous batching, as in Orca, Yu et
al. 2022). Layers are loaded and dropped while sessions on other layers go on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from p2pllm.errors import BusyError, ModelError, RequestError, SessionError
from p2pllm.execution.blocks import BLOCK_TOKENS
from p2pllm.execution.checkpoint import Checkpoint
from p2pllm.execution.engine import Engine
from p2pllm.execution.kv import SessionCache
from p2pllm.execution.meter import Meter
from p2pllm.execution.prefix import names_in
from p2pllm.execution.reservations import Reservations
from p2pllm.execution.types import Activation, ExecutorStats, SamplingParams, SessionKey, StageOutput, runs_of
from p2pllm.execution.validation import check_hidden, check_prefix, check_sampling, check_tokens
from p2pllm.execution.work import StepTimes
from p2pllm.execution.work_queue import Session, WorkQueue

__all__ = ["Executor"]

_SPEED_HALF_LIFE = 30.0


class Executor:
    """Runs some layers of a checkpoint: none at first. All methods are for the event loop's thread."""

    def __init__(
        self, checkpoint: Checkpoint, *, dtype: str, device: str, threads: int, quant: str = "none"
    ) -> None:
        """``threads`` is the share of the cores that steps may use."""
        self.checkpoint = checkpoint
        self._engine = Engine(checkpoint, dtype=dtype, device=device, threads=threads, quant=quant)
        self._held: frozenset[int] = frozenset()
        self._changing = asyncio.Lock()
        self._kv = Reservations()
        self._block_bytes = 0
        self._weight_bytes = 0
        self._sessions: dict[SessionKey, Session] = {}
        self._queue = WorkQueue()
        self._driver: asyncio.Task[None] | None = None
        self._closing = False
        self._layer_s = self._head_s = _speed(0.0)

    async def prepare(self) -> None:
        """Do what a first load would have to do first, see `Engine.prepare`. Raises `ModelError`."""
        await self._engine.prepare()

    @property
    def slices(self) -> tuple[tuple[int, int], ...]:
        """The runs of layers [start, end) that are ready, apart from each other, in order."""
        return runs_of(self._held)

    def holds(self, start: int, end: int) -> bool:
        """Whether all layers [start, end) are ready."""
        return start < end and self._held.issuperset(range(start, end))

    def sessions(self, start: int, end: int) -> int:
        """How many open sessions use any of layers [start, end)."""
        return len(self._using(start, end))

    async def load(
        self, start: int, end: int, *, kv_bytes: int, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Add layers [start, end): read those that are not here, and try them out. Sessions go on meanwhile.

        Loads and drops happen one after the other, in the order of the calls. ``kv_bytes`` is the memory for
        KV caches from then on (from now on, where that is less); ``progress`` hears (bytes read, bytes in
        all).

        Raises `ModelError` if the layers cannot be loaded, or ``kv_bytes`` does not hold even one block of
        all layers; then, and when cancelled, all is as it was.
        """
        async with self._changing:
            if self._closing:
                raise ModelError("loading was stopped")
            before = self._kv.pool.total
            if self._block_bytes and kv_bytes // self._block_bytes < before:
                self._kv.resize(kv_bytes // self._block_bytes, len(self._held))
                await self._engine.shorten(self._kv.heights(self._held))
            try:
                await self._add(start, end, kv_bytes, progress)
            except BaseException:
                self._kv.resize(before, len(self._held))
                await self._engine.retain(self._held, self._kv.heights(self._held))
                raise
            self._weight_bytes = self._engine.weight_bytes()
            self._start()

    async def drop(self, start: int, end: int, *, kv_bytes: int) -> None:
        """Free layers [start, end), as far as they are here; ``kv_bytes`` is for KV caches from then on.

        Sessions that use any of them end at once with `SessionError`.
        """
        async with self._changing:
            if self._closing:
                return  # which frees everything
            dropped = self._held & frozenset(range(start, end))
            self._held -= dropped
            for key in self._using(start, end):
                self._end(key, f"layers {start}:{end} were dropped here")
            self._kv.forget(dropped)
            if self.checkpoint.layers - 1 not in self._held:
                self._head_s = _speed(0.0)
            await self._engine.retain(self._held, self._kv.heights(self._held))
            self._weight_bytes = self._engine.weight_bytes()
            if self._block_bytes:
                self._kv.resize(kv_bytes // self._block_bytes, len(self._held))

    def reserve(
        self,
        key: SessionKey,
        *,
        start: int,
        end: int,
        tokens: int,
        sampling: SamplingParams | None = None,
        prefix: bytes = b"",
        owner: str = "",
    ) -> int:
        """Open a session over layers [start, end) with room for ``tokens`` tokens; never waits.

        ``prefix`` names the full blocks of 16 tokens that it begins with: 8 bytes for each, a hash of all up
        to its end and of how they came to be; names count for their ``owner`` only. Returns how many tokens
        are here already, a multiple of 16: the session may begin to run at any position up to there.

        Raises `BusyError` if there is no room or the layers are not here, `RequestError` if it asks for what
        no executor can do, `SessionError` if the key is taken.
        """
        if not 0 <= start < end <= self.checkpoint.layers:
            raise RequestError(f"layers {start}:{end} are not within 0:{self.checkpoint.layers}")
        if not self.holds(start, end):
            held = ", ".join(f"{first}:{last}" for first, last in self.slices) or "none"
            raise BusyError(f"layers {start}:{end} are not here (but {held})")
        if not 0 < tokens <= self.checkpoint.context:
            raise RequestError(f"{tokens} tokens asked for, the model's context is {self.checkpoint.context}")
        if sampling is not None:
            check_sampling(sampling)
        check_prefix(self.checkpoint, prefix)
        if key in self._sessions:
            raise SessionError(f"session {key[0]} is already open as stage {key[1]}")
        reservation = self._kv.open(start, end, tokens, owner, names_in(prefix))
        cached = reservation.shared * BLOCK_TOKENS
        cache = SessionCache(self._engine.store, reservation.tables, cached)
        self._sessions[key] = Session(cache, reservation, sampling, cached)
        return cached

    async def run(
        self, key: SessionKey, position: int, inputs: Sequence[int] | Activation, *, sample: bool
    ) -> StageOutput:
        """Run ``inputs`` at ``position``: token ids where the session begins at layer 0, hidden states
        elsewhere.

        A position before the end of the session takes back what is cached from there on. Runs of one session
        take effect in the order of the calls. With ``sample`` the last row's token is drawn, for position
        ``position + rows``; that needs a session that ends at the model's last layer and has sampling
        parameters.

        Raises `RequestError` for inputs that can never be right, `SessionError` if the session is not open,
        is released meanwhile, or lacks what precedes ``position``, and `BusyError` if it cannot grow.
        """
        session = self._sessions.get(key)
        if session is None or self._driver is None or self._driver.done():
            raise SessionError(f"session {key[0]} is not open here as stage {key[1]}")
        check_inputs = check_tokens if session.reservation.start == 0 else check_hidden
        count = check_inputs(self.checkpoint, inputs)
        if not 0 <= position <= session.length:
            raise SessionError(f"position {position} is past the {session.length} tokens of session {key[0]}")
        if position + count > self.checkpoint.context:
            raise RequestError(
                f"position {position + count} is past the model's context of {self.checkpoint.context}"
            )
        if sample and (session.sampling is None or session.reservation.end != self.checkpoint.layers):
            raise RequestError(
                f"session {key[0]} cannot sample here: not the last stage, or no sampling parameters"
            )
        self._queue.check_room(count)
        it, cache = session.reservation, session.cache
        settled, context = min(position, self._queue.settled(session)), self.checkpoint.context
        cache.copies += self._kv.make_place(it, position, position + count, settled=settled, most=context)
        cache.tables = it.tables
        session.length = position + count
        return await self._queue.add(session, position, inputs, sample=sample)

    def release(self, key: SessionKey, prefix: bytes = b"") -> None:
        """Close a session and free its blocks at once; its unfinished work fails with `SessionError`.

        The full blocks that ``prefix`` names, as for `reserve`, are kept for later sessions while nobody
        wants their room.
        """
        self._end(key, f"session {key[0]} was released", prefix)

    def stats(self) -> ExecutorStats:
        """Speed, load and memory as of now."""
        now = time.monotonic()
        layers = max(1, len(self._held))
        return ExecutorStats(
            layer_s=self._layer_s.value(now),
            head_s=self._head_s.value(now),
            wait_s=self._queue.wait_s(now),
            running=self._queue.running,
            waiting=self._queue.waiting,
            kv_blocks_total=self._kv.pool.total // layers,
            kv_blocks_free=max(0, self._kv.free) // layers,
            kv_blocks_cached=self._kv.cached // layers,
            kv_bytes_used=(self._kv.pool.total - self._kv.free) * self._block_bytes,
            weight_bytes=self._weight_bytes,
        )

    async def watch(self) -> None:
        """Wait until the executor has stopped; raises the bug that stopped it, if it was one."""
        driver = self._start()
        await asyncio.wait({driver})
        driver.result()

    async def close(self) -> None:
        """Stop: fail what waits, let the step that runs end, and leave no thread. Once more does no harm."""
        if self._closing:
            return
        self._closing = True
        self._engine.stop_reading()
        for key in list(self._sessions):
            self.release(key)
        self._queue.stop()
        try:
            if self._driver is not None:
                await self._driver
        finally:
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
            self._block_bytes = max(self._block_bytes, tried.token_bytes * BLOCK_TOKENS)
        blocks = kv_bytes // self._block_bytes
        if blocks < len(held):
            least = len(held) * self._block_bytes
            raise ModelError(f"no room for KV cache: {len(held)} layers need {least} bytes at least")
        if added:
            self._kv.windows |= {layer: tried.windows.get(layer) for layer in added}
        self._kv.resize(blocks, len(held))
        if not self._held:
            self._layer_s = _speed(times.layer_s or 0.0)
        if self.checkpoint.layers - 1 in added:
            self._head_s = _speed(times.head_s or 0.0)
        self._held = held

    def _using(self, start: int, end: int) -> list[SessionKey]:
        reserved = ((key, session.reservation) for key, session in self._sessions.items())
        return [key for key, it in reserved if it.start < end and start < it.end]

    def _end(self, key: SessionKey, reason: str, prefix: bytes = b"") -> None:
        session = self._sessions.pop(key, None)
        if session is not None:
            # What a step still writes is written before the next step, in which others have the blocks.
            self._kv.close(session.reservation, names_in(prefix), self._queue.settled(session))
            self._queue.forget(session, reason)

    def _start(self) -> asyncio.Task[None]:
        if self._driver is None:
            self._driver = asyncio.create_task(self._drive(), name="executor")
        return self._driver

    async def _drive(self) -> None:
        try:
            while works := await self._queue.take():
                outcomes, times = await self._engine.step(works)
                self._note(times)
                self._queue.finish(outcomes, times.step_s)
        finally:
            self._queue.fail_all("the executor has stopped")

    def _note(self, times: StepTimes) -> None:
        now = time.monotonic()
        if times.layer_s is not None:
            self._layer_s.add(times.layer_s, now)
        if times.head_s is not None:
            self._head_s.add(times.head_s, now)


def _speed(rest: float) -> Meter:
    return Meter(rest, half_life=_SPEED_HALF_LIFE)
