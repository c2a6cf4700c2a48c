"""How many requests an entry runs at once: as many as leave each of them within a small factor of the speed
that it would have alone. Pure.

A step for many sessions takes longer than one for a single session, but far less than as many steps: up to
some point more at once is good for everybody. Where that point is shows in the time between tokens, which is
taken apart: how fast the swarm is just now, whoever else is at work in it, and how many times as long it
takes for so many requests at once as for the fewest that were ever seen. The first changes from second to
second, the second hardly at all; so a swarm that gets slow does not look like one that is given too much. The
second is learnt where the number of requests has just changed, and the first in between: learnt at the same
time they would drift apart.
From there it is congestion control: twice as many, if by what is known there is place for them, until it was
too much for the first time, then one more in ten while all is well, and one less in ten when it is not (slow
start, additive increase, multiplicative decrease: Jacobson 1988, Chiu and Jain 1989). A number that was too
much is tried again half a minute later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

__all__ = ["STRETCH", "ConcurrencyLimit"]

STRETCH: Final = 1.8
"""The time between a chat's tokens may be so many times what it is alone, if nothing else is said."""

FIRST: Final = 1
MOST: Final = 256

ROUND: Final = 8
"""Tokens of each running request between two looks."""

HALF_LIFE_S: Final = 10.0
"""That a number was too much so long ago counts half."""

HEAVIEST: Final = 128.0
"""Tokens of each request that what is known of a number of them goes back."""

SETTLES: Final = 4.0
"""Tokens of each request after their number has changed that say little: prompts of new ones are read."""

CONTRAST: Final = 12.0
"""Tokens of each request after that which tell what the change has made of the time of a token."""

LATELY: Final = 8.0
"""Tokens of each request that the present speed of the swarm goes back."""

OUTLIER: Final = 2.5
"""A pause, as when a peer is lost, counts as so many times what was to be expected at most."""

LEAST: Final = 0.85
"""More requests take no less time than fewer, as far as that was measured: the rest is taken for chance."""

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

    def __init__(self, stretch: float = STRETCH) -> None:
        """``stretch``: the time between a chat's tokens may be so many times what it is alone."""
        self._stretch = stretch
        self._limit = float(FIRST)
        self._levels: dict[int, _Level] = {}
        self._speed_s = 0.0
        """What a token takes now, in the unit of the levels' ratios."""
        self._running = 0
        self._since = 0.0
        """Tokens of each request since so many run."""
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
        if running != self._running:
            self._running, self._since = running, 0.0
        self._since += 1 / running
        if self._since <= SETTLES:
            return
        level = self._levels.setdefault(running, _Level())
        if level.weight >= ENOUGH:
            interval_s = min(interval_s, OUTLIER * self._speed_s * level.ratio)
        if self._since <= SETTLES + CONTRAST or level.weight < ENOUGH:
            level.add(max(interval_s / self._speed_s, self._least(running)), 1 / running, now)
        else:
            self._speed_s += (interval_s / level.ratio - self._speed_s) / (LATELY * running)
        if level.weight >= ENOUGH:
            self._heard += 1
            if self._heard >= ROUND * running:
                self._heard = 0
                self._adjust(running, now)

    def _least(self, running: int) -> float:
        """The ratio for so many can hardly be less, by those for fewer."""
        fewer = (level.ratio for count, level in self._levels.items() if count < running)
        return LEAST * max(fewer, default=0.0)

    def _adjust(self, running: int, now: float) -> None:
        alone, ratio = self._alone(), self._levels[running].ratio
        allowed = self._stretch * alone
        if running > 1 and ratio > allowed:
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
            # No more than there would be place for if each of them took as much as those that run.
            straight = 1 + (running - 1) * (allowed - alone) / max(ratio - alone, 1e-9)
            more = max(self._limit + 1, min(self._growth * self._limit, straight))
            self._limit = max(self._limit, min(more, most))

    def _alone(self) -> float:
        """The ratio of a request alone, by the fewest that were ever seen at once."""
        known = sorted(
            # However long ago: where many come all the time, one alone is rarely seen.
            ((count, level) for count, level in self._levels.items() if level.weight >= ENOUGH),
            key=lambda known: known[0],
        )
        (lowest, alone), *others = ((count, level.ratio) for count, level in known)
        if lowest > 1 and others:
            count, more = others[0]
            slope = max(0.0, (more - alone) / (count - lowest))
            alone = max(alone / lowest, alone - slope * (lowest - 1))
        return alone
