"""What sessions wait for: at most one piece of each session's work in a step, those that decode first.

A long prompt is read piece by piece, as many rows at a time as `Pace` says, and sessions with prompts take
turns.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from p2pllm.errors import BusyError, P2PLLMError, SessionError
from p2pllm.execution.kv import SessionCache
from p2pllm.execution.meter import Meter
from p2pllm.execution.pace import Pace
from p2pllm.execution.reservations import Reservation
from p2pllm.execution.types import Activation, SamplingParams, StageOutput
from p2pllm.execution.work import Outcome, Work

__all__ = ["Session", "WorkQueue"]

_MAX_WAITING = 1024
"""Runs that may wait at once; entries are not trusted to hold back."""
_MAX_ROWS = 1 << 14
"""Rows that may wait at once, unless it is one run."""
_PATIENCE_S = 60.0
"""Work that has waited so long for its step is refused: whoever wanted it has gone elsewhere."""
_WAIT_HALF_LIFE = 5.0
_TURNS = 10
"""Turns of the event loop after a step in which those that it answered may ask for more."""


@dataclass(slots=True, eq=False)
class Session:
    """An open session. ``length`` is where it will stand once all its queued work has run."""

    cache: SessionCache
    reservation: Reservation
    sampling: SamplingParams | None
    length: int = 0


@dataclass(slots=True, eq=False)
class _Job:
    """Work with the caller that awaits it. The first ``done`` rows have run or are running."""

    session: Session
    work: Work
    future: asyncio.Future[StageOutput]
    queued_at: float
    done: int = 0
    parts: list[Activation] = field(default_factory=list)

    @property
    def left(self) -> int:
        return self.work.count - self.done

    def next(self, rows: int) -> Work:
        """The next rows as work of their own."""
        work, begin = self.work, self.done
        self.done += rows
        if rows == work.count:
            return work
        return Work(
            work.cache,
            work.tables,
            work.start,
            work.end,
            work.position + begin,
            _rows(work.inputs, begin, begin + rows),
            None if self.left else work.sampling,
        )


class WorkQueue:
    """Work that waits, and the work of the step that runs. For the event loop's thread."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[Session, deque[_Job]] = OrderedDict()
        self._running: list[_Job] = []
        self._answered: set[Session] = set()
        self._runs = self._rows = 0
        self._decoding = self._prefilling = 0
        self._arrived = asyncio.Event()
        self._stopped = False
        self._wait_s = Meter(0.0, half_life=_WAIT_HALF_LIFE)
        self._pace = Pace()

    @property
    def waiting(self) -> int:
        """How many runs wait for a step, or for the rest of their steps."""
        return self._runs

    @property
    def running(self) -> int:
        """How many runs are in the step that runs now."""
        return len(self._running)

    def wait_s(self, now: float) -> float:
        """How long (s) a run is expected to wait before its step starts."""
        return self._wait_s.value(now)

    def check_room(self, rows: int) -> None:
        """Raise `BusyError` if no more work may wait, or not so much."""
        if self._runs >= _MAX_WAITING or (self._rows and self._rows + rows > _MAX_ROWS):
            raise BusyError("too much work is waiting here")

    def settled(self, session: Session) -> int:
        """How many tokens of a session are there and will not be written again by work that waits or runs."""
        jobs = [job for job in self._running if job.session is session]
        jobs += self._waiting.get(session, ())
        return min([session.cache.length, *(job.work.position for job in jobs)])

    def add(
        self,
        session: Session,
        position: int,
        inputs: Sequence[int] | Activation,
        *,
        sample: bool,
    ) -> asyncio.Future[StageOutput]:
        """Queue work of ``session``; the future is settled when it has run or cannot run any more."""
        sampling = session.sampling if sample else None
        start, end = session.reservation.start, session.reservation.end
        cache = session.cache
        work = Work(cache, cache.tables, start, end, position, inputs, sampling)
        job = _Job(session, work, asyncio.get_running_loop().create_future(), time.monotonic())
        self._waiting.setdefault(session, deque()).append(job)
        self._runs += 1
        self._rows += work.count
        self._arrived.set()
        return job.future

    async def take(self) -> list[Work]:
        """Wait for work, then take a piece of every session's for a step; empty once stopped."""
        while not self._stopped:
            if not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
            await self._wait_for_answered()
            now = time.monotonic()
            self._refuse_old(now)
            if self._waiting and not self._stopped:
                return self._pieces(now)
        return []

    def finish(self, outcomes: list[Outcome], step_s: float) -> None:
        """Hand out what came of the work last taken, in its order; the step took ``step_s``."""
        self._pace.note(self._decoding, self._prefilling, step_s, time.monotonic())
        running, self._running = self._running, []
        for job, outcome in zip(running, outcomes, strict=True):
            if isinstance(outcome, P2PLLMError):
                job.session.length = min(job.session.length, job.work.cache.length)
                if job.session in self._waiting and self._waiting[job.session][0] is job:
                    self._remove(job)
                _settle(job.future, outcome)
            elif job.left == 0:
                if job.work.sampling is not None:
                    self._answered.add(job.session)
                _settle(job.future, _joined(job.parts, outcome))
            elif outcome.activation is not None:
                job.parts.append(outcome.activation)

    def forget(self, session: Session, reason: str) -> None:
        """Fail all work of a session with `SessionError`, also what runs."""
        for job in self._jobs():
            if job.session is session:
                _settle(job.future, SessionError(reason))
        for job in self._waiting.pop(session, ()):
            self._runs -= 1
            self._rows -= job.left
        self._answered.discard(session)

    def stop(self) -> None:
        """Take no more; `fail_all` says so to those who wait."""
        self._stopped = True
        self._arrived.set()

    def fail_all(self, reason: str) -> None:
        """Fail all work there is with `SessionError`."""
        for job in self._jobs():
            _settle(job.future, SessionError(reason))
        self._running = []
        self._waiting.clear()
        self._runs = self._rows = 0

    def _jobs(self) -> Iterator[_Job]:
        yield from self._running
        for jobs in self._waiting.values():
            yield from jobs

    async def _wait_for_answered(self) -> None:
        """Give sessions that were just answered the chance to be in the next step with their next token."""
        for _ in range(_TURNS):
            if self._waiting.keys() >= self._answered:
                break
            await asyncio.sleep(0)
        self._answered.clear()

    def _pieces(self, now: float) -> list[Work]:
        works = []
        firsts = [jobs[0] for jobs in self._waiting.values()]
        decoding = [job for job in firsts if job.work.count == 1]
        prompts = [job for job in firsts if job.work.count > 1]
        for job in decoding:
            works.append(self._piece(job, 1, now))
        rows = self._pace.rows(now, is_decoding=bool(decoding))
        for job in prompts:
            if rows > 0:
                count = min(job.left, rows)
                works.append(self._piece(job, count, now))
                rows -= count
                if job.session in self._waiting:
                    self._waiting.move_to_end(job.session)
        self._decoding = len(decoding)
        self._prefilling = sum(work.count for work in works) - len(decoding)
        return works

    def _piece(self, job: _Job, rows: int, now: float) -> Work:
        if job.done == 0:
            self._wait_s.add(now - job.queued_at, now)
        work = job.next(rows)
        self._rows -= rows
        if job.left == 0:
            self._remove(job)
        self._running.append(job)
        return work

    def _remove(self, job: _Job) -> None:
        """Take the first job of a session out of those that wait."""
        jobs = self._waiting[job.session]
        jobs.popleft()
        if not jobs:
            del self._waiting[job.session]
        self._runs -= 1
        self._rows -= job.left

    def _refuse_old(self, now: float) -> None:
        for jobs in list(self._waiting.values()):
            job = jobs[0]
            if job.done == 0 and now - job.queued_at > _PATIENCE_S:
                self._remove(job)
                job.session.length = min(job.session.length, job.session.cache.length)
                _settle(job.future, BusyError(f"no step was free for {_PATIENCE_S:.0f} s"))


def _rows(inputs: Sequence[int] | Activation, begin: int, end: int) -> Sequence[int] | Activation:
    if not isinstance(inputs, Activation):
        return inputs[begin:end]
    count, width = inputs.shape
    size = len(inputs.data) // count
    return Activation(inputs.dtype, (end - begin, width), inputs.data[begin * size : end * size])


def _joined(parts: Sequence[Activation], last: StageOutput) -> StageOutput:
    """What came of a run in pieces."""
    if not parts or last.activation is None:
        return last
    everything = [*parts, last.activation]
    rows = sum(part.shape[0] for part in everything)
    data = b"".join(part.data for part in everything)
    return StageOutput(Activation(last.activation.dtype, (rows, *last.activation.shape[1:]), data), None)


def _settle(future: asyncio.Future[StageOutput], outcome: Outcome) -> None:
    """Give a caller its outcome, unless it has left or already knows."""
    if future.done():
        return
    if isinstance(outcome, P2PLLMError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
