"""What sessions wait for: their work in the order it came, at most one piece of each session in a step."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from p2pllm.errors import BusyError, P2PLLMError, SessionError
from p2pllm.execution.kv import SessionCache
from p2pllm.execution.meter import Meter
from p2pllm.execution.types import Activation, SamplingParams, StageOutput
from p2pllm.execution.work import Outcome, Work

__all__ = ["Session", "WorkQueue"]

_MAX_WAITING = 1024
"""Runs that may wait at once; entries are not trusted to hold back."""
_WAIT_HALF_LIFE = 5.0


@dataclass(slots=True, eq=False)
class Session:
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

    session: Session
    work: Work
    future: asyncio.Future[StageOutput]
    queued_at: float


class WorkQueue:
    """Work that waits, and the work of the step that runs. For the event loop's thread."""

    def __init__(self) -> None:
        self._waiting: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._arrived = asyncio.Event()
        self._stopped = False
        self._wait_s = Meter(0.0, half_life=_WAIT_HALF_LIFE)

    @property
    def waiting(self) -> int:
        """How many runs wait for a step."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """How many runs are in the step that runs now."""
        return len(self._running)

    def wait_s(self, now: float) -> float:
        """How long (s) a run is expected to wait before its step starts."""
        return self._wait_s.value(now)

    def check_room(self) -> None:
        """Raise `BusyError` if no more work may wait."""
        if len(self._waiting) >= _MAX_WAITING:
            raise BusyError("too much work is waiting here")

    def add(
        self, session: Session, position: int, inputs: Sequence[int] | Activation, *, sample: bool
    ) -> asyncio.Future[StageOutput]:
        """Queue work of ``session``; the future is settled when it has run or cannot run any more."""
        sampling = session.sampling if sample else None
        work = Work(session.cache, session.start, session.end, position, inputs, sampling)
        job = _Job(session, work, asyncio.get_running_loop().create_future(), time.monotonic())
        self._waiting.append(job)
        self._arrived.set()
        return job.future

    async def take(self) -> list[Work]:
        """Wait for work, then take the first piece of every session for a step; empty once stopped."""
        while not self._waiting and not self._stopped:
            self._arrived.clear()
            await self._arrived.wait()
        if self._stopped:
            return []
        now = time.monotonic()
        taken: dict[Session, _Job] = {}
        left: deque[_Job] = deque()
        for job in self._waiting:
            if job.session in taken:
                left.append(job)
            else:
                taken[job.session] = job
                self._wait_s.add(now - job.queued_at, now)
        self._waiting = left
        self._running = list(taken.values())
        return [job.work for job in self._running]

    def finish(self, outcomes: list[Outcome]) -> None:
        """Hand out what came of the work last taken, in its order."""
        for job, outcome in zip(self._running, outcomes, strict=True):
            if isinstance(outcome, P2PLLMError):
                job.session.length = min(job.session.length, job.work.cache.length)
            _settle(job.future, outcome)
        self._running = []

    def forget(self, session: Session, reason: str) -> None:
        """Fail all work of a session with `SessionError`, also what runs."""
        for job in [*self._running, *self._waiting]:
            if job.session is session:
                _settle(job.future, SessionError(reason))
        self._waiting = deque(job for job in self._waiting if job.session is not session)

    def stop(self) -> None:
        """Take no more; `fail_all` says so to those who wait."""
        self._stopped = True
        self._arrived.set()

    def fail_all(self, reason: str) -> None:
        """Fail all work there is with `SessionError`."""
        for job in [*self._running, *self._waiting]:
            _settle(job.future, SessionError(reason))
        self._running, self._waiting = [], deque()


def _settle(future: asyncio.Future[StageOutput], outcome: Outcome) -> None:
    """Give a caller its outcome, unless it has left or already knows."""
    if future.done():
        return
    if isinstance(outcome, P2PLLMError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
