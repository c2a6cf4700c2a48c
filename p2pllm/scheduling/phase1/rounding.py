"""From the linear relaxation to whole pipelines.

Rounded down, the relaxation is nearly the whole answer, and mostly a greedy packing of the peers left over is
the rest. Where it is not, they are searched: every choice of a pattern, and every peer left idle, is charged
what it wastes by the relaxation's weights, against a budget that no solution of the wanted size can exceed.
So few patterns come into question, and peers that the budget does not allow to idle must each be in one of
them: the search branches where there are fewest. If what is left over cannot be solved, less is kept of the
rounded part; once nothing is kept, the search is a proof.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from p2pllm.scheduling.phase1.greedy import pack_greedily
from p2pllm.scheduling.phase1.patterns import EPSILON, Kinds, Pattern
from p2pllm.scheduling.phase1.relaxation import Relaxed

__all__ = ["rounded"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]
Bools = npt.NDArray[np.bool_]

MAX_DEPTH = 150
"""Replicas that are searched for at once; each takes a level of recursion."""

MAX_PATTERNS = 4000
"""Patterns that a search looks at; with more it is no proof."""


def rounded(
    kinds: Kinds, relaxed: Relaxed, replicas: int, wanted: int, *, effort: int
) -> tuple[list[Pattern] | None, bool]:
    """(patterns of ``replicas`` pipelines with at most ``wanted`` stages or None, whether None is a
    proof).
    """
    budget = wanted - (replicas * relaxed.price - relaxed.base) + EPSILON * (1 + sum(kinds.counts))
    if budget < 0:
        return None, True
    drop = 0
    while True:
        kept = {p: n for p, used in relaxed.usage.items() if (n := math.floor(used + EPSILON) - drop) > 0}
        left = replicas - sum(kept.values())
        if left > MAX_DEPTH:
            return None, False
        unspent = budget - sum(number * _waste(relaxed, pattern) for pattern, number in kept.items())
        counts = list(kinds.counts)
        for pattern, number in kept.items():
            for kind in pattern:
                counts[kind] -= number
        # A relaxation that was cut short may use more replicas or peers than there are.
        if left >= 0 and unspent >= 0 and min(counts) >= 0:
            whole = [pattern for pattern, number in kept.items() for _ in range(number)]
            greedy = pack_greedily(kinds, counts) if left else {}
            quick = sorted((p for p, number in greedy.items() for _ in range(number)), key=len)[:left]
            if len(quick) == left and sum(map(len, whole + quick)) <= wanted:
                return whole + quick, False
            if not relaxed.is_optimal:
                # Its weights are no guide for a search.
                return None, False
            search = _Search(relaxed, counts, unspent, effort)
            rest = search.run(left)
            if rest is not None:
                return whole + rest, False
            if not kept:
                return None, search.is_exhaustive
        drop = 2 * drop + 1


def _waste(relaxed: Relaxed, pattern: Pattern) -> float:
    """What a pattern weighs above the cheapest."""
    return sum(relaxed.prices.weights[kind] for kind in pattern) - relaxed.price


class _Search:
    """Depth-first search for disjoint patterns of little waste among the peers left over."""

    def __init__(self, relaxed: Relaxed, counts: Sequence[int], budget: float, effort: int) -> None:
        found = itertools.chain.from_iterable(
            relaxed.prices.patterns(largest, counts, relaxed.price + budget) for largest in range(len(counts))
        )
        some = list(itertools.islice(found, MAX_PATTERNS))
        self.is_exhaustive = len(some) < MAX_PATTERNS
        self._left = effort
        self._budget = budget
        self._counts = np.array(counts)
        # Least waste first; of equal ones what the relaxation uses most.
        order = sorted(some, key=lambda p: (round(_waste(relaxed, p), 6), -relaxed.usage.get(p, 0.0), p))
        self._patterns = order
        self._waste = np.array([_waste(relaxed, pattern) for pattern in order])
        self._members = np.zeros((len(order), len(counts)), dtype=np.intp)
        for row, pattern in enumerate(order):
            for kind in pattern:
                self._members[row, kind] += 1
        self._has = self._members > 0
        self._idle = np.array(relaxed.prices.weights) - 1.0

    def run(self, replicas: int) -> list[Pattern] | None:
        """Patterns of so many pipelines, or None."""
        everything = np.ones(len(self._patterns), dtype=np.bool_)
        rows = self._choose(replicas, self._counts, everything, self._budget)
        self.is_exhaustive = self.is_exhaustive and self._left > 0
        return None if rows is None else [self._patterns[row] for row in rows]

    def _choose(self, replicas: int, counts: Ints, allowed: Bools, budget: float) -> list[int] | None:
        """Rows of so many patterns out of the ``allowed`` ones that waste at most ``budget``, or None."""
        if replicas == 0:
            return []
        self._left -= 1
        if self._left <= 0:
            return None
        allowed = allowed & (self._waste <= budget) & (self._members <= counts).all(axis=1)
        idle = counts * self._idle
        kind = self._narrowest(counts, idle, self._has[allowed].sum(axis=0), budget)
        if kind is None:
            return None
        for row in np.flatnonzero(allowed & self._has[:, kind]).tolist():
            left = counts - self._members[row]
            rest = self._choose(replicas - 1, left, allowed, budget - float(self._waste[row]))
            if rest is not None:
                return [row, *rest]
            # All solutions with this pattern have been seen.
            allowed[row] = False
        if idle[kind] > budget:
            return None
        without = counts.copy()
        without[kind] = 0
        return self._choose(replicas, without, allowed, budget - float(idle[kind]))

    def _narrowest(self, counts: Ints, idle: Floats, choices: Ints, budget: float) -> int | None:
        """The kind to decide on next: the one in fewest patterns of those that the budget does not let idle,
        else of those in any pattern. None when there is no way on.
        """
        if float(idle[choices == 0].sum()) > budget:
            return None
        must = (counts > 0) & (idle > budget)
        among = np.flatnonzero(must if must.any() else choices)
        return int(among[choices[among].argmin()]) if len(among) else None
