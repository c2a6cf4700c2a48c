"""What sessions wait for: at most one piece of each session's work in a step, those that decode first.

A long prompt is read piece by piece, as many rows at a time as `Pace` says. Prompts take turns between
owners, and then between an owner's sessions, see `Waiting`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from p2pllm.errors import BusyError, P2PLLMError, SessionError
from p2pllm.execution.job import Job, Session
from p2pllm.execution.meter import Meter
from p2pllm.execution.pace import Pace
from p2pllm.execution.tally import Tally, Totals
from p2pllm.execution.types import Activation, StageOutput
from p2pllm.execution.waiting import Waiting
from p2pllm.execution.work import Outcome, Work

__all__ = ["WorkQueue"]

_PATIENCE_S = 60.0
"""Work that has waited so long for its step is refused: whoever wanted it has gone elsewhere."""
_WAIT_HALF_LIFE = 5.0
_TURNS = 10
"""Turns of the event loop after a step in which those that it answered may ask for more."""


class WorkQueue:
    """Work that waits, and the work of the step that runs. For the event loop's thread."""

    def __init__(self) -> None:
        self._waiting = Waiting()
        self._running: list[Job] = []
        self._answered: set[Session] = set()
        self._decoding = self._prefilling = 0
        self._arrived = asyncio.Event()
        self._stopped = False
        self._wait_s = Meter(0.0, half_life=_WAIT_HALF_LIFE)
        self._pace = Pace()
        self._tally = Tally()

    @property
    def waiting(self) -> int:
        """How many runs wait for a step, or for the rest of their steps."""
        return self._waiting.runs

    @property
    def running(self) -> int:
        """How many runs are in the step that runs now."""
        return len(self._running)

    @property
    def totals(self) -> Totals:
        """What its steps have done so far."""
        return self._tally.totals

    def wait_s(self, now: float) -> float:
        """How long (s) a run is expected to wait before its step starts."""
        return self._wait_s.value(now)

    def check_room(self, session: Session, rows: int) -> None:
        """Raise `BusyError` if no more work of the session's owner may wait, or not so much."""
        self._waiting.check_room(session.owner, rows)

    def settled(self, session: Session) -> int:
        """How many tokens of a session are there and will not be written again by work that waits or runs.

        None are while blocks are still to be copied: these must not be given to others before.
        """
        if session.cache.copies:
            return 0
        return min([session.cache.length, *(job.work.position for job in self._of(session))])

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
        job = Job(session, work, asyncio.get_running_loop().create_future(), time.monotonic())
        self._waiting.add(job)
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
        self._tally.stepped(step_s, self._decoding + self._prefilling)
        self._pace.note(self._decoding, self._prefilling, step_s, time.monotonic())
        running, self._running = self._running, []
        for job, outcome in zip(running, outcomes, strict=True):
            if isinstance(outcome, P2PLLMError):
                job.session.length = min(job.session.length, job.work.cache.length)
                if job in self._waiting.of(job.session):
                    self._waiting.remove(job)
                job.settle(outcome)
            elif job.left == 0:
                if job.work.sampling is not None or job.work.count > 1:
                    self._answered.add(job.session)
                job.settle(outcome)
            elif outcome.activation is not None:
                job.parts.append(outcome.activation)

    def forget(self, session: Session, reason: str) -> bool:
        """Fail all work of a session with `SessionError`, also what runs; returns whether there was any.

        The session's ``length`` is then where it will stand when what runs has run.
        """
        jobs = self._of(session)
        for job in jobs:
            job.settle(SessionError(reason))
        for job in list(self._waiting.of(session)):
            self._waiting.remove(job)
            session.length = min(session.length, job.work.position + job.done)
        self._answered.discard(session)
        return bool(jobs)

    def stop(self) -> None:
        """Take no more; `fail_all` says so to those who wait."""
        self._stopped = True
        self._arrived.set()

    def fail_all(self, reason: str) -> None:
        """Fail all work there is with `SessionError`."""
        for job in (*self._running, *self._waiting):
            job.settle(SessionError(reason))
        self._running = []
        self._waiting = Waiting()

    def _of(self, session: Session) -> list[Job]:
        running = [job for job in self._running if job.session is session]
        return [*running, *self._waiting.of(session)]

    async def _wait_for_answered(self) -> None:
        """Give sessions that were just answered the chance to be in the next step with their next token, or
        the next part of their prompt.
        """
        for _ in range(_TURNS):
            if self._waiting.sessions >= self._answered:
                break
            await asyncio.sleep(0)
        self._answered.clear()

    def _pieces(self, now: float) -> list[Work]:
        decoding = [(job, 1) for job in self._waiting.firsts if job.work.count == 1]
        prompts = self._waiting.deal(self._pace.rows(now, decoding=len(decoding)))
        for job, _ in (*decoding, *prompts):
            if job.done == 0:
                self._wait_s.add(now - job.queued_at, now)
                self._tally.waited(now - job.queued_at)
            self._running.append(job)
        self._decoding, self._prefilling = len(decoding), sum(rows for _, rows in prompts)
        return [self._waiting.take(job, rows) for job, rows in (*decoding, *prompts)]

    def _refuse_old(self, now: float) -> None:
        for job in self._waiting.firsts:
            if job.done == 0 and now - job.queued_at > _PATIENCE_S:
                self._waiting.remove(job)
                job.session.length = min(job.session.length, job.session.cache.length)
                job.settle(BusyError(f"no step was free for {_PATIENCE_S:.0f} s"))
