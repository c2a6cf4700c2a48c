"""What waits to be run, by owner and session: who may add to it, and whose prompts are read next.

In a step all owners get equally many rows, but none more than it wants (max-min fairness, as in Bertsekas and
Gallager, Data Networks, 1992), and an owner's go to those of its sessions that have waited longest. An owner
may have as much waiting as is left free (dynamic thresholds, Choudhury and Hahne 1998), so whoever floods is
refused while there is still room for others.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from p2pllm.errors import BusyError
from p2pllm.execution.job import Job, Session
from p2pllm.execution.work import Work

__all__ = ["Waiting"]

_MAX_RUNS = 2048
"""Runs that may wait at once, half of them while there is one owner; entries are not trusted to hold back."""
_MAX_ROWS = 1 << 15
"""Rows likewise, but for owners' only runs: these are bounded by the KV cache, in which they have a place."""
_LEAST_ROWS = 16
"""Owners rather take turns in steps than get fewer rows of each."""


@dataclass(slots=True)
class _Load:
    runs: int = 0
    rows: int = 0


class Waiting:
    """Jobs by session, with sessions and owners in the order of their turns."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[Session, deque[Job]] = OrderedDict()
        self._owners: OrderedDict[str, _Load] = OrderedDict()
        self._all = _Load()

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        for jobs in self._jobs.values():
            yield from jobs

    @property
    def runs(self) -> int:
        """How many jobs there are."""
        return self._all.runs

    @property
    def sessions(self) -> Set[Session]:
        """Those that have any."""
        return self._jobs.keys()

    @property
    def firsts(self) -> list[Job]:
        """The job of each session that is next."""
        return [jobs[0] for jobs in self._jobs.values()]

    def of(self, session: Session) -> Sequence[Job]:
        """The jobs of a session, in order."""
        return self._jobs.get(session, ())

    def check_room(self, owner: str, rows: int) -> None:
        """Raise `BusyError` if no more of this owner's work may wait, or not so much."""
        own, everything = self._owners.get(owner, _Load()), self._all
        is_crowded = own.runs + 1 > _MAX_RUNS - (everything.runs + 1)
        if is_crowded or (own.rows and own.rows + rows > _MAX_ROWS - (everything.rows + rows)):
            raise BusyError("too much work is waiting here")

    def add(self, job: Job) -> None:
        """Put a job behind the others of its session."""
        self._jobs.setdefault(job.session, deque()).append(job)
        self._count(job, 1, job.left)

    def take(self, job: Job, rows: int) -> Work:
        """Take the next rows of a session's first job, and the job out with its last."""
        work = job.next(rows)
        self._count(job, 0, -rows)
        if job.left == 0:
            self.remove(job)
        return work

    def remove(self, job: Job) -> None:
        """Take out a session's first job."""
        jobs = self._jobs[job.session]
        jobs.popleft()
        if not jobs:
            del self._jobs[job.session]
        self._count(job, -1, -job.left)

    def deal(self, rows: int) -> list[tuple[Job, int]]:
        """Which prompts are in a step of ``rows`` rows, and how many of these are theirs.

        After that it is the turn of others.
        """
        prompts: dict[str, list[Job]] = {owner: [] for owner in self._owners}
        for job in self.firsts:
            if job.work.count > 1:
                prompts[job.session.owner].append(job)
        wanted: dict[str, int] = {}
        room = rows
        for owner, jobs in prompts.items():
            if jobs and room > 0:
                wanted[owner] = sum(job.left for job in jobs)
                room -= min(wanted[owner], _LEAST_ROWS)
                self._owners.move_to_end(owner)
        dealt = []
        # Who wants little is first, and leaves more for the others.
        for place, owner in enumerate(sorted(wanted, key=wanted.__getitem__)):
            share = min(wanted[owner], rows // (len(wanted) - place))
            rows -= share
            for job in prompts[owner]:
                if share > 0:
                    part = min(job.left, share)
                    dealt.append((job, part))
                    share -= part
                    self._jobs.move_to_end(job.session)
        return dealt

    def _count(self, job: Job, runs: int, rows: int) -> None:
        owner = job.session.owner
        own = self._owners.setdefault(owner, _Load())
        for load in (own, self._all):
            load.runs += runs
            load.rows += rows
        if own.runs == 0:
            del self._owners[owner]
