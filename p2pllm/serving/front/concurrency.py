"""How many requests an entry runs at once: as many as leave each of them within a small factor of the speed
that it would have alone. Pure.

A step for many sessions takes longer than one for a single session, but far less than as many steps: up to
some point more at once is good for everybody. Where that point is shows in the time between tokens, which is
taken apart: how fast the swarm is just now, whoever else is at work in it, and how many times as long it
takes for so many requests at once as for the fewest that were ever seen. The first changes from second to
second, the second hardly at all; so a swarm that gets slow does not look like one that is given too much.
From there it is congestion control: twice as many until it was too much for the first time, then one more in
ten while all is well, and one less in ten when it is not (slow start, additive increase, multiplicative
decrease: Jacobson 1988, Chiu and Jain 1989). A number that was too much is not tried again for some minutes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

__all__ = ["STRETCH", "ConcurrencyLimit"]

STRETCH: Final = 1.6
"""The time between a chat's tokens may be so many times what it is alone."""

FIRST: Final = 2
MOST: Final = 256

ROUND: Final = 8
"""Tokens of each running request between two looks."""

HALF_LIFE_S: Final = 60.0
"""What was measured so long ago counts half."""

HEAVIEST: Final = 128.0
"""Tokens of each request that what is known of a number of them goes back."""

LATELY: Final = 8.0
"""Tokens of each request that the present speed of the swarm goes back."""

OUTLIER: Final = 4.0
"""A pause, as when a peer is lost, counts as so many times what was to be expected at most."""

ENOUGH: Final = 8.0
"""Tokens of each request before an average is believed: those of one step are not independent."""


@dataclass(slots=True)
class _Level:
    """How long a token takes while so many requests run, beside the present speed."""

    ratio: float = 0.0
    weight: float = 0.0
    at: float = 0.0

    def weigh(self, now: float) -> float:
        return self.weight * math.exp2((self.at - now) / HALF_LIFE_S)

    def add(self, ratio: float, part: float, now: float) -> None:
        self.weight = min(self.weigh(now) + part, HEAVIEST)
        self.ratio += (ratio - self.ratio) * part / self.weight
        self.at = now


class ConcurrencyLimit:
    """The limit, and what it has learnt. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._limit = float(FIRST)
        self._levels: dict[int, _Level] = {}
        self._speed_s = 0.0
        """What a token takes now, in the unit of the levels' ratios."""
        self._heard = 0
        self._growth = 2.0

    @property
    def value(self) -> int:
        """How many requests may run now."""
        return int(self._limit)

    def note(self, running: int, interval_s: float, now: float) -> None:
        """Between two tokens of one of ``running`` requests so much time has passed."""
        if interval_s <= 0:
            return  # tokens that came together say nothing
        self._speed_s = self._speed_s or interval_s
        level = self._levels.setdefault(running, _Level())
        if level.weight >= ENOUGH:
            interval_s = min(interval_s, OUTLIER * self._speed_s * level.ratio)
        level.add(interval_s / self._speed_s, 1 / running, now)
        if level.weight >= ENOUGH:
            self._speed_s += (interval_s / level.ratio - self._speed_s) / (LATELY * running)
            self._heard += 1
            if self._heard >= ROUND * running:
                self._heard = 0
                self._adjust(running, now)

    def _adjust(self, running: int, now: float) -> None:
        allowed = STRETCH * self._alone()
        if running > 1 and self._levels[running].ratio > allowed:
            self._growth = 1.1
            # From what runs: a limit that is lower already takes its time to be seen.
            self._limit = min(self._limit, max(1.0, 0.9 * running))
        elif running >= self.value:
            bad = (
                count
                for count, level in self._levels.items()
                if count > running and level.ratio > allowed and level.weigh(now) >= ENOUGH
            )
            most = min(min(bad, default=MOST + 1) - 1, MOST)
            more = max(self._limit + 1, self._growth * self._limit)
            self._limit = max(self._limit, min(more, most))

    def _alone(self) -> float:
        """The ratio of a request alone, by the fewest that were ever seen at once."""
        known = sorted(
            ((count, level) for count, level in self._levels.items() if level.weight >= ENOUGH),
            key=lambda known: known[0],
        )
        (lowest, alone), *others = ((count, level.ratio) for count, level in known)
        if lowest > 1 and others:
            count, more = others[0]
            slope = max(0.0, (more - alone) / (count - lowest))
            alone = max(alone / lowest, alone - slope * (lowest - 1))
        return alone
