"""The fewest stages for k replicas within one region, s*_r(k): found, and bounded from below.

The linear relaxation gives a lower bound and, rounded down, nearly the whole answer. What rounding leaves
over is searched exhaustively: depth first over patterns, where every choice is charged what it wastes by the
relaxation's weights, against a budget that no solution of the wanted size can exceed. If the rest has no
solution, less is kept of the rounded part; once nothing is kept, the search is a proof.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from p2pllm.scheduling.phase1.patterns import EPSILON, Kinds, Pattern
from p2pllm.scheduling.phase1.relaxation import Relaxation, Relaxed
from p2pllm.scheduling.phase1.rounding import rounded
from p2pllm.scheduling.types import Capacity

__all__ = ["Packing"]


class Packing:
    """What is known of one region. ``effort`` bounds the search, in choices tried per question; ``hints`` are
    groups of capacities that made good pipelines elsewhere, for a faster start.

    ``lower[k]`` bounds s*(k) from below, infinite where k replicas are proven impossible; ``found[k]`` are
    patterns of k replicas. The two meet unless the effort did not suffice.
    """

    def __init__(
        self,
        layers: int,
        capacities: Sequence[Capacity],
        *,
        effort: int,
        hints: Iterable[Sequence[Capacity]] = (),
    ) -> None:
        self.kinds = Kinds.of(layers, capacities)
        self.found: dict[int, list[Pattern]] = {0: []}
        self._effort = effort
        self._peers = sum(self.kinds.counts)
        self._relaxation = Relaxation(self.kinds, self._known(hints))
        self.lower = _by_room(self.kinds)
        self.used: list[tuple[Capacity, ...]] = []
        """The patterns of the relaxation, as hints for another region."""
        if self.most:
            relaxed = self._relaxation.solve(self.most)
            self._bound(relaxed)
            self.used = [tuple(self.kinds.capacities[kind] for kind in pattern) for pattern in relaxed.usage]

    @property
    def most(self) -> int:
        """More replicas than this are proven impossible."""
        return len(self.lower) - 1

    def stages(self, replicas: int) -> float:
        """The stages of the best solution found, infinite if there is none."""
        patterns = self.found.get(replicas)
        return math.inf if patterns is None else sum(map(len, patterns))

    def solve(self, replicas: int) -> None:
        """Make ``lower`` and ``found`` meet at ``replicas``, as far as the effort reaches."""
        if replicas in self.found or replicas > self.most:
            return
        relaxed = self._relaxation.solve(replicas)
        self._bound(relaxed)
        proven = True
        more = 0 if relaxed.is_optimal else self._peers
        while replicas <= self.most:
            wanted = min(int(self.lower[replicas]) + more, self._peers)
            patterns, exhaustive = rounded(self.kinds, relaxed, replicas, wanted, effort=self._effort)
            if patterns is not None:
                self.found[replicas] = patterns
                return
            proven = proven and exhaustive
            if proven:
                self._raise(replicas, wanted + 1)
            elif wanted == self._peers:
                return
            else:
                more = 2 * more + 1

    def _known(self, hints: Iterable[Sequence[Capacity]]) -> Iterator[Pattern]:
        """Yield hints as patterns of these kinds, as far as there are so many peers of them."""
        index = self.kinds.index
        for hint in hints:
            if all(capacity in index for capacity in hint):
                pattern = tuple(sorted(index[capacity] for capacity in hint))
                if all(pattern.count(kind) <= self.kinds.counts[kind] for kind in pattern):
                    yield pattern

    def _bound(self, relaxed: Relaxed) -> None:
        """Take in the bounds that a relaxation implies for every number of replicas."""
        if relaxed.price == math.inf:
            self.lower = self.lower[:1]
            return
        replicas = np.arange(len(self.lower))
        implied = np.ceil(replicas * relaxed.price - relaxed.base - EPSILON * self._peers)
        self.lower = np.maximum(self.lower, implied)
        self._trim()

    def _raise(self, replicas: int, stages: int) -> None:
        self.lower[replicas] = stages
        self._trim()

    def _trim(self) -> None:
        """Each replica takes a stage at least; drop what more peers than there are would have to serve."""
        replicas = np.arange(len(self.lower))
        self.lower = np.maximum.accumulate(self.lower - replicas) + replicas
        self.lower = self.lower[: np.searchsorted(self.lower, self._peers, side="right")]


def _by_room(kinds: Kinds) -> npt.NDArray[np.float64]:
    """The fewest stages for each k if layers could be cut up at will and only the roomiest peers were used.

    Two ends cost a pipeline at least the least that any peer loses there.
    """
    if not kinds.counts:
        return np.zeros(1)
    first = min((c.middle - c.first for c in kinds.capacities if c.first), default=0)
    last = min((c.middle - c.last for c in kinds.capacities if c.last), default=0)
    target = kinds.layers + first + last
    room = [
        target if single else min(capacity.middle, target - 1)
        for capacity, single in zip(kinds.capacities, kinds.singles, strict=True)
    ]
    held = np.cumsum([0, *np.sort(np.repeat(room, kinds.counts))[::-1]])
    return np.searchsorted(held, np.arange(held[-1] // target + 1) * target).astype(np.float64)
