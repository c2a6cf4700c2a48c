"""Runs of open sessions: work that is done piece by piece, each with the caller that awaits it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from p2pllm.errors import P2PLLMError
from p2pllm.execution.kv import SessionCache
from p2pllm.execution.reservations import Reservation
from p2pllm.execution.types import Activation, SamplingParams, StageOutput
from p2pllm.execution.work import Outcome, Work

__all__ = ["Job", "Session"]


@dataclass(slots=True, eq=False)
class Session:
    """An open session. ``length`` is where it will stand once all its queued work has run."""

    cache: SessionCache
    reservation: Reservation
    sampling: SamplingParams | None
    length: int = 0

    @property
    def owner(self) -> str:
        """The entry that it is run for; those of whom none is known count as one entry's."""
        return self.reservation.owner.partition(":")[0]


@dataclass(slots=True, eq=False)
class Job:
    """Work with the caller that awaits it. The first ``done`` rows have run or are running."""

    session: Session
    work: Work
    future: asyncio.Future[StageOutput]
    queued_at: float
    done: int = 0
    parts: list[Activation] = field(default_factory=list)
    """What came of the rows that have run, where it is not all yet."""

    @property
    def left(self) -> int:
        """Rows that are still to be run."""
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
            _rows(work.inputs, begin, self.done),
            None if self.left else work.sampling,
        )

    def settle(self, outcome: Outcome) -> None:
        """Give the caller the outcome of the last piece, with all before it, or the error that ends the run;
        unless it has left or already knows.
        """
        if self.future.done():
            return
        if isinstance(outcome, P2PLLMError):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(_joined(self.parts, outcome))


def _rows(inputs: Sequence[int] | Activation, begin: int, end: int) -> Sequence[int] | Activation:
    return inputs.rows(begin, end) if isinstance(inputs, Activation) else inputs[begin:end]


def _joined(parts: Sequence[Activation], last: StageOutput) -> StageOutput:
    if not parts or last.activation is None:
        return last
    everything = [*parts, last.activation]
    rows = sum(part.shape[0] for part in everything)
    data = b"".join(part.data for part in everything)
    return StageOutput(Activation(last.activation.dtype, (rows, *last.activation.shape[1:]), data), None)
