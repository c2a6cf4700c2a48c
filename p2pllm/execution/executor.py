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

from p2pllm.errors import BusyError, RequestError, SessionError
from p2pllm.execution.blocks import BLOCK_TOKENS, outputs_layer
from p2pllm.execution.checkpoint import Checkpoint
from p2pllm.execution.engine import Engine
from p2pllm.execution.holdings import Holdings
from p2pllm.execution.job import Session
from p2pllm.execution.kv import SessionCache
from p2pllm.execution.kv_budget import KvBudget
from p2pllm.execution.prefix import names_in
from p2pllm.execution.reservations import Reservations
from p2pllm.execution.types import DTYPES, Activation, ExecutorStats, SamplingParams, SessionKey, StageOutput
from p2pllm.execution.validation import check_hidden, check_prefix, check_sampling, check_tokens
from p2pllm.execution.work_queue import WorkQueue

__all__ = ["Executor"]


class Executor:
    """Runs some layers of a checkpoint: none at first. All methods are for the event loop's thread."""

    def __init__(
        self, checkpoint: Checkpoint, *, dtype: str, device: str, threads: int, quant: str = "none"
    ) -> None:
        """``threads`` is the share of the cores that steps may use."""
        self.checkpoint = checkpoint
        self._engine = Engine(checkpoint, dtype=dtype, device=device, threads=threads, quant=quant)
        self._kv = Reservations()
        self._budget = KvBudget(checkpoint.layers, checkpoint.hidden * DTYPES[dtype])
        self._holdings = Holdings(checkpoint, self._engine, self._kv, self._budget)
        self._sessions: dict[SessionKey, Session] = {}
        self._queue = WorkQueue()
        self._driver: asyncio.Task[None] | None = None
        self._closing = False

    async def prepare(self) -> None:
        """Do what a first load would have to do first, see `Engine.prepare`. Raises `ModelError`."""
        await self._engine.prepare()

    @property
    def slices(self) -> tuple[tuple[int, int], ...]:
        """The runs of layers [start, end) that are ready, apart from each other, in order."""
        return self._holdings.slices

    def holds(self, start: int, end: int) -> bool:
        """Whether all layers [start, end) are ready."""
        return self._holdings.holds(start, end)

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
        await self._holdings.load(start, end, kv_bytes, progress)
        self._start()

    async def drop(self, start: int, end: int, *, kv_bytes: int) -> None:
        """Free layers [start, end), as far as they are here; ``kv_bytes`` is for KV caches from then on.

        Sessions that use any of them end at once with `SessionError`.
        """

        def leave() -> None:
            for key in self._using(start, end):
                self._end(key, f"layers {start}:{end} were dropped here")

        await self._holdings.drop(start, end, kv_bytes, leave)

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
        to its end and of how they came to be; names count for their ``owner`` only. What is before a colon in
        that is the entry: work of all entries takes turns. Returns how many tokens are here already, a
        multiple of 16: the session may begin to run at any position up to there.

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
        kept = outputs_layer(end, self.checkpoint.layers)
        reservation = self._kv.open(start, end, tokens, owner, names_in(prefix), outputs=kept)
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
        session = self._open(key)
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
        self._queue.check_room(session, count)
        it, cache = session.reservation, session.cache
        settled, context = min(position, self._queue.settled(session)), self.checkpoint.context
        cache.copies += self._kv.make_place(it, position, position + count, settled=settled, most=context)
        cache.tables = it.tables
        session.length = position + count
        return await self._queue.add(session, position, inputs, sample=sample)

    def length(self, key: SessionKey) -> int:
        """How many tokens a session has, of all that it was asked to run; raises `SessionError` if it is not
        open.
        """
        return self._open(key).cache.length

    async def outputs(self, key: SessionKey, start: int, end: int) -> Activation:
        """What `run` returned for tokens [start, end) of a session, the very bytes, once more.

        All that the session has is kept, also what it began with; but nothing where it ends at the model's
        last layer. Raises `SessionError` if it is not open or does not have those tokens.
        """
        session = self._open(key)
        it = session.reservation
        if it.outputs is None:
            raise SessionError(f"session {key[0]} keeps no outputs here: it is the last stage")
        return await self._engine.outputs(session.cache, it.tables[None], it.outputs, start, end)

    async def take_back(self, key: SessionKey, position: int) -> int:
        """Take a session back to at most ``position`` tokens; returns how many it has then.

        Work of the session that has not ended fails with `SessionError`, also what is asked for meanwhile;
        of its tokens those stay that have run. There are fewer where layers with a window have let go of what
        they would need: those that came from the prefix cache, or none.

        Raises `SessionError` if the session is not open, or released meanwhile.
        """
        session = self._open(key)
        cache = session.cache
        while self._queue.forget(session, f"session {key[0]} was taken back"):
            await self._engine.settle(cache)
            if self._open(key) is not session:
                raise SessionError(f"session {key[0]} was released")
        session.length = self._kv.take_back(session.reservation, min(max(0, position), session.length))
        cache.tables, cache.length = session.reservation.tables, session.length
        return session.length

    def release(self, key: SessionKey, prefix: bytes = b"") -> None:
        """Close a session and free its blocks at once; its unfinished work fails with `SessionError`.

        The full blocks that ``prefix`` names, as for `reserve`, are kept for later sessions while nobody
        wants their room.
        """
        self._end(key, f"session {key[0]} was released", prefix)

    def stats(self) -> ExecutorStats:
        """Speed, load and memory as of now."""
        now = time.monotonic()
        width, speed = self._holdings.width, self._holdings.speed
        return ExecutorStats(
            layer_s=speed.layer_s(now),
            head_s=speed.head_s(now),
            wait_s=self._queue.wait_s(now),
            running=self._queue.running,
            waiting=self._queue.waiting,
            kv_blocks_total=self._kv.pool.total // width,
            kv_blocks_free=max(0, self._kv.free) // width,
            kv_blocks_cached=self._kv.cached // width,
            kv_bytes_used=(self._kv.pool.total - self._kv.free) * self._budget.block_bytes,
            weight_bytes=self._holdings.weight_bytes,
            totals=self._queue.totals,
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
        self._holdings.stop()
        for key in list(self._sessions):
            self.release(key)
        self._queue.stop()
        try:
            if self._driver is not None:
                await self._driver
        finally:
            await self._holdings.close()

    def _open(self, key: SessionKey) -> Session:
        session = self._sessions.get(key)
        if session is None or self._driver is None or self._driver.done():
            raise SessionError(f"session {key[0]} is not open here as stage {key[1]}")
        return session

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
                self._holdings.speed.note(times, time.monotonic())
                self._queue.finish(outcomes, times.step_s)
        finally:
            self._queue.fail_all("the executor has stopped")
