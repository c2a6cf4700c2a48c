"""Whether a chain that says nothing is only slow, and if not, which of its stages is to blame. Pure.

Silence is no proof: the entry asks all stages where they are. One that does not answer is dead or frozen; one
that has work and does not get on is stuck; one that takes many times as long as it should is a straggler.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Ask", "Suspect", "Suspicion", "Wait"]

ANSWER_S = 0.6
"""Within this a stage that lives says where it is: its event loop does not wait for its steps."""

_SILENCE_S = 0.3
_MAX_SILENCE_S = 1.0
_SILENT_STEPS = 5.0

_CHECK_S = 0.5
"""How often to look for a straggler while tokens come late."""

_SLOW_FACTOR = 5.0
_SLOW_S = 2.0
_SLOW_FLOOR_S = 0.02
_ALONE_FACTOR = 2.5
"""A straggler is so much slower than the others are, measured by what they should take: where all are slow,
it is the load, and no other chain would be better.
"""

_STUCK_S = 3.0
_STUCK_STEPS = 10.0
_STUCK_PROMPT_S = 10.0
"""A prompt may wait for others' prompts, a token does not."""

_LATE_S = 0.1
"""Who comes so late to look has been held up, and so may be the answers."""


_TICK_S = 1e-3


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to be done for so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask all stages where they are."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """These stages are to be replaced; ``is_slow`` ones do work."""

    stages: tuple[int, ...]
    reason: str
    is_slow: bool = False


class Suspicion:
    """Watches one chain from when it was fed."""

    def __init__(self, work_s: Sequence[float], step_s: float, fed: int, now: float) -> None:
        """``work_s`` is how long a token should keep each stage at work, ``step_s`` how long it should take
        around the ring; the first stage was given ``fed`` tokens in all.
        """
        self.interval_s = 0.0
        """What tokens have been taking lately; 0 before there were two."""
        self._work_s = tuple(work_s)
        self._silence_s = min(max(_SILENCE_S, _SILENT_STEPS * step_s), _MAX_SILENCE_S)
        self._stuck_s = max(_STUCK_S, _STUCK_STEPS * step_s)
        self._step_s = step_s
        self._fed = fed
        self._tokens = 0
        self._news_s = self._token_s = now
        self._asked_s: float | None = None
        self._checked_s = now
        self._answered: set[int] = set()
        self._positions: dict[int, tuple[int, float]] = {}
        self._steps: dict[int, float] = {}
        self._slow_since: dict[int, float] = {}
        self._pardoned_s = now
        self._next_look = now

    @property
    def load(self) -> float:
        """How many times as long as they should stages take, the slower half of them left out; 1 at least."""
        ratios = self._ratios().values()
        return max(1.0, statistics.median_low(ratios)) if len(ratios) > 1 else 1.0

    def token(self, now: float) -> None:
        """A token has come."""
        if self._tokens:
            taken = now - self._token_s
            self.interval_s = (
                taken if self._tokens == 1 else self.interval_s + 0.3 * (taken - self.interval_s)
            )
        self._tokens += 1
        self._fed += 1
        self._news_s = self._token_s = now

    def answer(self, stage: int, position: int, step_s: float, now: float) -> None:
        """A stage has run ``position`` tokens; the last step took ``step_s``, or has so far."""
        self._answered.add(stage)
        before = self._positions.get(stage, (-1, 0.0))[0]
        is_at_work = (before, self._steps.get(stage)) != (position, step_s)
        if before != position:
            self._positions[stage] = position, now
        self._steps[stage] = step_s
        # Who waits for another may have been slow in its last step, and is not the reason.
        if is_at_work and step_s > max(_SLOW_FACTOR * self._work_s[stage], _SLOW_FLOOR_S):
            self._slow_since.setdefault(stage, now)
        else:
            self._slow_since.pop(stage, None)

    def pardon(self, until: float) -> None:
        """There is nobody to take a straggler's place: no more of that until then."""
        self._pardoned_s = until

    def look(self, now: float) -> Wait | Ask | Suspect:
        """Say what is to be done now; to be called again after every answer, and when the wait is over."""
        late = now - self._next_look
        if late > _LATE_S:
            self._news_s = min(self._news_s + late, now)
            self._asked_s = None if self._asked_s is None else min(self._asked_s + late, now)
        found = self._find(now)
        self._next_look = now + (found.seconds if isinstance(found, Wait) else 0.0)
        return found

    def _find(self, now: float) -> Wait | Ask | Suspect:
        stages = range(len(self._work_s))
        if self._asked_s is not None:
            silent = tuple(stage for stage in stages if stage not in self._answered)
            if silent and now - self._asked_s < ANSWER_S:
                return Wait(max(_TICK_S, self._asked_s + ANSWER_S - now))
            if silent and self._asked_s >= self._news_s:
                return Suspect(silent, "no sign of life")
            self._asked_s = None
            suspect = self._stuck(now) or self._straggler(now)
            if suspect is not None:
                return suspect
        is_late = self._tokens > 1 and self.interval_s > 2 * self._step_s
        since = max(self._news_s, self._checked_s)
        due = since + self._silence_s
        if is_late and self._news_s > self._checked_s:
            due = min(due, self._checked_s + _CHECK_S)
        if now < due:
            return Wait(max(_TICK_S, due - now))
        self._asked_s = self._checked_s = now
        self._answered.clear()
        return Ask()

    def _stuck(self, now: float) -> Suspect | None:
        patience = self._stuck_s if self._tokens else max(self._stuck_s, _STUCK_PROMPT_S)
        if now - self._news_s < patience:
            return None
        before = self._fed
        for stage in range(len(self._work_s)):
            position, since = self._positions.get(stage, (0, now))
            if position < before or stage == len(self._work_s) - 1:
                if now - max(since, self._news_s) < patience:
                    return None
                return Suspect((stage,), f"no progress in {patience:.0f} s")
            before = position
        return None

    def _straggler(self, now: float) -> Suspect | None:
        if now < self._pardoned_s:
            return None
        ratios = self._ratios()
        for stage, since in self._slow_since.items():
            others = [ratio for other, ratio in ratios.items() if other != stage]
            is_alone = not others or ratios[stage] > _ALONE_FACTOR * statistics.median(others)
            if is_alone and now - since >= _SLOW_S:
                taken = f"{self._steps[stage] * 1000:.0f} ms for {self._work_s[stage] * 1000:.0f}"
                return Suspect((stage,), f"a straggler: it takes {taken}", is_slow=True)
        return None

    def _ratios(self) -> dict[int, float]:
        """How many times as long as it should each stage takes for a step."""
        return {
            stage: taken / max(self._work_s[stage], _SLOW_FLOOR_S / _SLOW_FACTOR)
            for stage, taken in self._steps.items()
        }
