"""The executor: one worker thread that runs a slice for all sessions at once.

Everything but the forward pass happens on the event loop, so there are no locks: sessions, the pool and the
queue belong to it. A driver task hands all waiting work to the thread, one step at a time, and hands out what
comes back. Work that arrives during a step is in the next one (continuous batching in its simplest form).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from p2pllm.errors import BusyError, ModelError, P2PLLMError, RequestError, SessionError
from p2pllm.execution.checkpoint import Checkpoint
from p2pllm.execution.kv import BLOCK_TOKENS, KvPool, SessionCache, blocks_for
from p2pllm.execution.meter import Meter
from p2pllm.execution.types import Activation, ExecutorStats, SamplingParams, SessionKey, StageOutput
from p2pllm.execution.validation import check_hidden, check_sampling, check_tokens
from p2pllm.execution.work import Outcome, StepTimes, Work

if TYPE_CHECKING:
    from p2pllm.execution.stage import Stage

__all__ = ["Executor"]

_MAX_WAITING = 1024
"""Runs that may wait at once; entries are not trusted to hold back."""
_GROW_TOKENS = 256
_SPEED_HALF_LIFE = 30.0
_WAIT_HALF_LIFE = 5.0


@dataclass(slots=True, eq=False)
class _Session:
    """A reservation. ``length`` is where the session will stand once all its queued work has run."""

    cache: SessionCache
    start: int
    end: int
    blocks: int
    sampling: SamplingParams | None
    length: int = 0


@dataclass(slots=True, eq=False)
class _Job:
    """Work with the caller that awaits it."""

    session: _Session
    work: Work
    future: asyncio.Future[StageOutput]
    queued_at: float


class Executor:
    """Runs layers [start, end) of a checkpoint. All methods are for the event loop's thread."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        start: int,
        end: int,
        *,
        dtype: str,
        device: str,
        threads: int,
        kv_bytes: int,
    ) -> None:
        """``threads`` is the worker's share of the cores, ``kv_bytes`` memory for KV caches."""
        self.checkpoint = checkpoint
        self.start, self.end = start, end
        self._dtype, self._device, self._threads, self._kv_bytes = dtype, device, threads, kv_bytes
        self._pool = KvPool(0)
        self._sessions: dict[SessionKey, _Session] = {}
        self._queue: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._arrived = asyncio.Event()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=f"p2pllm-layers-{start}-{end}")
        self._weight_bytes = 0
        self._driver: asyncio.Task[None] | None = None
        self._closing = False
        self._layer_s = self._head_s = Meter(0.0, half_life=_SPEED_HALF_LIFE)
        self._wait_s = Meter(0.0, half_life=_WAIT_HALF_LIFE)

    async def load(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Load the slice, measure it, and begin to work. ``progress`` hears (bytes loaded, bytes in all).

        Raises `ModelError` if the slice cannot be loaded or ``kv_bytes`` holds not even one block.
        """
        loop = asyncio.get_running_loop()

        def report(done: int, total: int) -> None:
            if self._closing:
                raise ModelError("loading was stopped")
            if progress is not None:
                loop.call_soon_threadsafe(progress, done, total)

        stage, times, block_bytes = await loop.run_in_executor(self._worker, self._load, report)
        layers = self.end - self.start
        self._pool = KvPool(self._kv_bytes // block_bytes)
        if self._pool.total < layers:
            raise ModelError(
                f"no room for KV cache: {layers} layers need {layers * block_bytes} bytes at least"
            )
        self._layer_s = Meter(times.layer_s or 0.0, half_life=_SPEED_HALF_LIFE)
        self._head_s = Meter(times.head_s or 0.0, half_life=_SPEED_HALF_LIFE)
        self._weight_bytes = stage.weight_bytes
        self._driver = asyncio.create_task(self._drive(stage), name=f"executor-{self.start}-{self.end}")

    def reserve(
        self, key: SessionKey, *, start: int, end: int, tokens: int, sampling: SamplingParams | None = None
    ) -> None:
        """Open a session over layers [start, end) with room for ``tokens`` tokens; never waits.

        Raises `BusyError` if there is no room, `RequestError` if it asks for what this executor can never do,
        `SessionError` if the key is taken.
        """
        if not self.start <= start < end <= self.end:
            raise RequestError(f"layers {start}:{end} are not within {self.start}:{self.end}")
        if not 0 < tokens <= self.checkpoint.context:
            raise RequestError(f"{tokens} tokens asked for, the model's context is {self.checkpoint.context}")
        if sampling is not None:
            check_sampling(sampling)
        if key in self._sessions:
            raise SessionError(f"session {key[0]} is already open as stage {key[1]}")
        blocks = blocks_for(tokens, end - start)
        self._pool.take(blocks)
        capacity = blocks // (end - start) * BLOCK_TOKENS
        self._sessions[key] = _Session(SessionCache(start, end, capacity), start, end, blocks, sampling)

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
        check_inputs = check_tokens if session.start == 0 else check_hidden
        count = check_inputs(self.checkpoint, inputs)
        if not 0 <= position <= session.length:
            raise SessionError(f"position {position} is past the {session.length} tokens of session {key[0]}")
        if position + count > self.checkpoint.context:
            raise RequestError(
                f"position {position + count} is past the model's context of {self.checkpoint.context}"
            )
        if sample and (session.sampling is None or session.end != self.checkpoint.layers):
            raise RequestError(
                f"session {key[0]} cannot sample here: not the last stage, or no sampling parameters"
            )
        if len(self._queue) >= _MAX_WAITING:
            raise BusyError("too much work is waiting here")
        self._grow(session, position + count)
        session.length = position + count
        job = self._job(session, position, inputs, sample)
        self._queue.append(job)
        self._arrived.set()
        return await job.future

    def release(self, key: SessionKey) -> None:
        """Close a session and free its blocks at once; its unfinished work fails with `SessionError`."""
        session = self._sessions.pop(key, None)
        if session is None:
            return
        self._pool.give(session.blocks)
        session.blocks = 0
        for job in [*self._running, *self._queue]:
            if job.session is session:
                _settle(job.future, SessionError(f"session {key[0]} was released"))
        self._queue = deque(job for job in self._queue if job.session is not session)

    def stats(self) -> ExecutorStats:
        """Speed, load and memory as of now."""
        now = time.monotonic()
        layers = self.end - self.start
        return ExecutorStats(
            layer_s=self._layer_s.value(now),
            head_s=self._head_s.value(now),
            wait_s=self._wait_s.value(now),
            running=len(self._running),
            waiting=len(self._queue),
            kv_blocks_total=self._pool.total // layers,
            kv_blocks_free=self._pool.free // layers,
            weight_bytes=self._weight_bytes,
        )

    async def watch(self) -> None:
        """Wait until the executor has stopped; raises the bug that stopped it, if it was one."""
        if self._driver is not None:
            await asyncio.wait({self._driver})
            self._driver.result()

    async def close(self) -> None:
        """Stop: fail what waits, let the step that runs end, and leave no thread. Once more does no harm."""
        if self._closing:
            return
        self._closing = True
        for key in list(self._sessions):
            self.release(key)
        self._arrived.set()
        try:
            if self._driver is not None:
                await self._driver
        finally:
            await asyncio.wrap_future(self._worker.submit(lambda: None))  # what the thread still does is over
            self._worker.shutdown()

    async def _drive(self, stage: Stage) -> None:
        from p2pllm.execution.step import run_step

        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._arrived.wait()
                if self._closing:
                    return
                self._running = self._take()
                works = [job.work for job in self._running]
                outcomes, times = await loop.run_in_executor(self._worker, run_step, stage, works)
                self._finish(outcomes, times)
        finally:
            for job in [*self._running, *self._queue]:
                _settle(job.future, SessionError("the executor has stopped"))

    def _take(self) -> list[_Job]:
        """The first waiting job of every session."""
        now = time.monotonic()
        taken: dict[_Session, _Job] = {}
        left: deque[_Job] = deque()
        for job in self._queue:
            if job.session in taken:
                left.append(job)
            else:
                taken[job.session] = job
                self._wait_s.add(now - job.queued_at, now)
        self._queue = left
        if not left:
            self._arrived.clear()
        return list(taken.values())

    def _finish(self, outcomes: list[Outcome], times: StepTimes) -> None:
        now = time.monotonic()
        if times.layer_s is not None:
            self._layer_s.add(times.layer_s, now)
        if times.head_s is not None:
            self._head_s.add(times.head_s, now)
        for job, outcome in zip(self._running, outcomes, strict=True):
            if isinstance(outcome, P2PLLMError):
                job.session.length = min(job.session.length, job.work.cache.length)
            _settle(job.future, outcome)
        self._running = []

    def _job(
        self, session: _Session, position: int, inputs: Sequence[int] | Activation, sample: bool
    ) -> _Job:
        sampling = session.sampling if sample else None
        work = Work(session.cache, session.start, session.end, position, inputs, sampling)
        return _Job(session, work, asyncio.get_running_loop().create_future(), time.monotonic())

    def _grow(self, session: _Session, tokens: int) -> None:
        layers = session.end - session.start
        more = blocks_for(tokens, layers) - session.blocks
        if more > 0:
            # Some way ahead while there is room: the cache is copied each time it grows.
            ahead = blocks_for(min(tokens + _GROW_TOKENS, self.checkpoint.context), layers) - session.blocks
            more = ahead if ahead <= self._pool.free else more
            self._pool.take(more)
            session.blocks += more
            session.cache.capacity = session.blocks // layers * BLOCK_TOKENS

    def _load(self, report: Callable[[int, int], None]) -> tuple[Stage, StepTimes, int]:
        """On the worker thread: load and measure. Returns the stage, its times, the bytes of a KV block."""
        import torch

        from p2pllm.execution.loader import load_stage
        from p2pllm.execution.step import measure

        torch.set_num_threads(self._threads)
        stage = load_stage(
            self.checkpoint, self.start, self.end, dtype=self._dtype, device=self._device, progress=report
        )
        times, token_bytes = measure(stage, self.checkpoint.hidden)
        return stage, times, token_bytes * BLOCK_TOKENS


def _settle(future: asyncio.Future[StageOutput], outcome: Outcome) -> None:
    """Give a caller its outcome, unless it has left or already knows."""
    if future.done():
        return
    if isinstance(outcome, P2PLLMError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
