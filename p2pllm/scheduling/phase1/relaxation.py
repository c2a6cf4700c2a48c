"""The linear relaxation of Phase 1: how many replicas, of how few stages, if pipelines could be cut in parts.

Variables say how often each pattern of kinds is used (Gilmore and Gomory's formulation of cutting stock, here
for covering). Its optimal dual gives every kind a weight and every replica a price, so that

    s*(k)  >=  k · min over patterns of Σ weights  -  Σ over peers of (weight - 1)

for any weights >= 1 whatever: a lower bound that anybody can check. Patterns are made on demand (column
generation): only those that are cheaper than a replica's present price can improve the solution.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from p2pllm.scheduling.phase1.greedy import pack_greedily
from p2pllm.scheduling.phase1.patterns import EPSILON, Kinds, Pattern, Prices

__all__ = ["Relaxation", "Relaxed"]

PRIZE = 1e4
"""What a replica is worth in stages: replicas first, then few stages."""

MAX_WORK = 2**28
"""Numbers of the inverse that pivots may change: a second or two, far more than machines of any real kinds
take. If it is cut short the bound is weak, but true.
"""


@dataclass(frozen=True, slots=True)
class Relaxed:
    """A solution for at most some number of replicas, and the bound that comes with it."""

    usage: dict[Pattern, float]
    prices: Prices
    price: float
    """The weight of the cheapest pattern: s*(k) >= k · price - base."""
    base: float
    """Σ over peers of (weight - 1)."""
    is_optimal: bool
    """False where the work was cut short."""


class Relaxation:
    """The programme of one region; successive calls of `solve` go on from what is already known.

    Rows are the kinds and, last, the number of replicas; columns begin with the slack of each row. A revised
    simplex with an explicit inverse: there are at most as many rows as distinct capacities.
    """

    def __init__(self, kinds: Kinds, hints: Iterable[Pattern] = ()) -> None:
        """``hints`` are patterns that are likely to be of use, such as those of a region alike."""
        self._kinds = kinds
        rows = len(kinds.counts) + 1
        self._patterns: list[Pattern] = []
        self._known: set[Pattern] = set()
        self._columns = np.eye(rows)
        self._worth = np.zeros(rows)
        self._inverse = np.eye(rows)
        self._basis = np.arange(rows)
        self._values = np.array([*kinds.counts, 0], dtype=np.float64)
        self._limit = 0
        self._pivots_left = MAX_WORK // rows**2
        self._last: Relaxed | None = None
        self._add(list(hints))

    def solve(self, replicas: int) -> Relaxed:
        """The most replicas up to ``replicas``, and the fewest stages for them; once work has been cut short,
        what was reached then.
        """
        if self._last is not None and not self._last.is_optimal:
            return self._last
        self._values += self._inverse[:, -1] * (replicas - self._limit)
        self._limit = replicas
        self._restore()
        if len(self._patterns) < len(self._kinds.counts):
            self._start()
        while True:
            self._improve()
            duals = self._worth[self._basis] @ self._inverse
            weights = (1.0 + np.maximum(duals[:-1], 0.0)).tolist()
            base = sum(count * (w - 1.0) for count, w in zip(self._kinds.counts, weights, strict=True))
            prices = Prices(self._kinds, weights)
            if self._suffices(prices.cheapest, base) or not self._generate(prices, PRIZE - float(duals[-1])):
                break
        rows = len(self._values)
        usage = {
            self._patterns[column - rows]: float(value)
            for column, value in zip(self._basis.tolist(), self._values, strict=True)
            if column >= rows and value > EPSILON
        }
        self._last = Relaxed(usage, prices, prices.cheapest, base, self._pivots_left > 0)
        return self._last

    def _start(self) -> None:
        """Begin with patterns that go together, and with those that are cheap by the layers that peers
        hold.
        """
        kinds = self._kinds
        self._add([pattern for pattern in pack_greedily(kinds, kinds.counts) if pattern not in self._known])
        by_layers = [1.0 + PRIZE * capacity.middle / kinds.layers for capacity in kinds.capacities]
        self._generate(Prices(kinds, by_layers), math.inf)

    def _suffices(self, price: float, base: float) -> bool:
        """Whether nothing better is left between the solution at hand and the bound, both in whole
        numbers.
        """
        used = self._basis >= len(self._values)
        stages = float(((PRIZE - self._worth[self._basis]) * self._values)[used].sum())
        replicas = float(self._values[used].sum())
        if replicas >= self._limit - EPSILON:
            return math.ceil(self._limit * price - base - EPSILON) >= math.ceil(stages - EPSILON)
        return (sum(self._kinds.counts) + base) / price < math.floor(replicas + EPSILON) + 1.0 - EPSILON

    def _generate(self, prices: Prices, limit: float) -> bool:
        """Add the cheapest pattern of each largest kind if below ``limit``; False if there is no new one."""
        cheap = (prices.cheapest_with(kind, limit - EPSILON) for kind in range(len(prices.weights)))
        found = [pattern for pattern in cheap if pattern is not None and pattern not in self._known]
        if not found or not self._pivots_left:
            return False
        self._add(found)
        return True

    def _add(self, patterns: Sequence[Pattern]) -> None:
        if not patterns:
            return
        self._known.update(patterns)
        self._patterns += patterns
        columns = np.zeros((len(self._values), len(patterns)))
        columns[-1] = 1.0
        for index, pattern in enumerate(patterns):
            for kind in pattern:
                columns[kind, index] += 1.0
        self._columns = np.hstack([self._columns, columns])
        self._worth = np.concatenate([self._worth, PRIZE - columns[:-1].sum(axis=0)])

    def _improve(self) -> None:
        """Primal simplex: to the optimum over the columns at hand."""
        while self._pivots_left:
            gains = self._worth - (self._worth[self._basis] @ self._inverse) @ self._columns
            entering = int(gains.argmax())
            if gains[entering] <= EPSILON:
                return
            direction = self._inverse @ self._columns[:, entering]
            usable = direction > EPSILON
            ratios = np.full(len(direction), np.inf)
            np.divide(self._values, direction, out=ratios, where=usable)
            self._pivot(int(ratios.argmin()), entering, direction)

    def _restore(self) -> None:
        """Dual simplex: back to values of zero or more after the limit on replicas fell."""
        while self._pivots_left:
            leaving = int(self._values.argmin())
            if self._values[leaving] >= -EPSILON:
                return
            gains = self._worth - (self._worth[self._basis] @ self._inverse) @ self._columns
            row = self._inverse[leaving] @ self._columns
            ratios = np.full(len(row), np.inf)
            np.divide(gains, row, out=ratios, where=row < -EPSILON)
            entering = int(ratios.argmin())
            self._pivot(leaving, entering, self._inverse @ self._columns[:, entering])

    def _pivot(self, leaving: int, entering: int, direction: npt.NDArray[np.float64]) -> None:
        self._pivots_left -= 1
        row = self._inverse[leaving] / direction[leaving]
        step = self._values[leaving] / direction[leaving]
        self._inverse -= direction[:, None] * row
        self._inverse[leaving] = row
        self._values -= direction * step
        self._values[leaving] = step
        self._basis[leaving] = entering
