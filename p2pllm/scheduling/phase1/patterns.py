"""Which peers can make a pipeline together, counted by kind.

Peers of equal capacity are one *kind* (in practice: a GPU type), and a *pattern* is a multiset of kinds that
holds one replica and would not without any one of its members. There are few kinds and so few patterns,
however many peers there are; that is what keeps Phase 1 small.

Weights on the kinds price a pattern. The cheapest one follows from a dynamic programme over the layers that
are still to be held, `Prices`, which also bounds every partial pattern, so that dear ones are never looked
at.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from p2pllm.scheduling.types import Capacity

__all__ = ["EPSILON", "Kinds", "Pattern", "Prices"]

Pattern: TypeAlias = tuple[int, ...]
"""Indices of kinds, ascending, one per member."""

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.intp]

EPSILON = 1e-6
"""Weights are sums of a few dozen floats of at most 10^4."""


@dataclass(frozen=True)
class Kinds:
    """Distinct capacities, the largest first, and how many peers have each."""

    layers: int
    capacities: tuple[Capacity, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, layers: int, capacities: Sequence[Capacity]) -> Kinds:
        """Count the capacities of peers that can serve at all, alone or with others."""
        found: Counter[Capacity] = Counter()
        for capacity, count in Counter(capacities).items():
            if capacity.middle >= 1:
                found[_useful(layers, capacity)] += count
        if layers < 2 or not (any(c.first for c in found) and any(c.last for c in found)):
            found = Counter({c: count for c, count in found.items() if c.both >= layers})
        ordered = sorted(found, reverse=True)
        return cls(layers, tuple(ordered), tuple(found[capacity] for capacity in ordered))

    def by_capacity(self, capacities: Iterable[Capacity]) -> dict[Capacity, int]:
        """The kind of each capacity; those that can serve in no pipeline are left out."""
        useful = {capacity: _useful(self.layers, capacity) for capacity in set(capacities)}
        return {capacity: self.index[same] for capacity, same in useful.items() if same in self.index}

    @cached_property
    def index(self) -> dict[Capacity, int]:
        """The kind of each of `capacities`."""
        return {capacity: kind for kind, capacity in enumerate(self.capacities)}

    def complete(self, pattern: Pattern) -> bool:
        """Whether such peers hold the model in some order, each at least one layer."""
        if len(pattern) < 2:
            return bool(pattern) and self.singles[pattern[0]]
        missing = self.layers
        for kind in pattern:
            missing -= self.capacities[kind].middle
        if missing > 0 or len(pattern) > self.layers:
            return False
        firsts = sorted((self._losses[kind][0], i) for i, kind in enumerate(pattern))[:2]
        lasts = sorted((self._losses[kind][1], i) for i, kind in enumerate(pattern))[:2]
        return missing + min(f + e for f, i in firsts for e, j in lasts if i != j) <= 0

    @cached_property
    def _losses(self) -> tuple[tuple[float, float], ...]:
        """What each kind loses as first and as last, infinite where it holds nothing there."""
        return tuple(
            (c.middle - c.first if c.first else math.inf, c.middle - c.last if c.last else math.inf)
            for c in self.capacities
        )

    @cached_property
    def singles(self) -> tuple[bool, ...]:
        """Whether one peer of the kind holds the whole model."""
        return tuple(capacity.both >= self.layers for capacity in self.capacities)

    @cached_property
    def steps(self) -> tuple[_Step, ...]:
        """For each kind what its peers can do to an unfinished pipeline."""
        steps = []
        for capacity, count, single in zip(self.capacities, self.counts, self.singles, strict=True):
            # More than these are never needed: the ends may hold little, the others hold all the same.
            most = -(-self.layers // capacity.middle) + 2
            steps.append(_step(self.layers, capacity, min(count, most), single=single))
        return tuple(steps)


def _useful(layers: int, capacity: Capacity) -> Capacity:
    """A capacity without differences that no pipeline notices, so that there are fewer kinds."""
    if capacity.both >= layers:
        return Capacity.same(layers)
    most = layers - 1
    return Capacity(min(capacity.middle, most), min(capacity.first, most), min(capacity.last, most), 0)


FIRST, LAST = 1, 2
"""Bits of an unfinished pipeline's *state*: the ends that it still lacks."""

BOTH = FIRST | LAST


@dataclass(frozen=True)
class _Step:
    """All ways in which the peers of one kind can join an unfinished pipeline.

    An unfinished pipeline is a *lack*: ``state`` · (L + 1) + layers still needed. Ways differ in how many
    peers join and which ends they take; ``lacks[way, lack]`` is what is then still lacking (the index behind
    the last one where the way is closed), ``taken[way]`` the number of peers.
    """

    places: tuple[tuple[int, int], ...]
    """(bit of the state or 0 for the middle, layers held there) for a single peer."""
    taken: Floats  # [W, 1]
    lacks: Ints  # [W, 4 (L + 1)]


@lru_cache(maxsize=256)
def _step(layers: int, capacity: Capacity, count: int, *, single: bool) -> _Step:
    """The ways of up to ``count`` peers; one that is enough by itself stands alone or not at all."""
    state, need = _lacks(layers)
    never = len(state)
    ways = [(0, np.arange(never))]
    if single:
        alone = np.full(never, never)
        alone[-1] = 0
        return _Step((), *_stacked([*ways, (1, alone)]))
    rooms = {0: capacity.middle, FIRST: capacity.first, LAST: capacity.last}
    for ends in (0, FIRST, LAST, BOTH):
        bits = [bit for bit in (FIRST, LAST) if ends & bit]
        if not all(rooms[bit] for bit in bits):
            continue
        held = sum(rooms[bit] for bit in bits)
        lacking = np.where(state & ends == ends, (state - ends) * (layers + 1), never)
        for number in range(max(1, len(bits)), min(count, layers) + 1):
            room = held + (number - len(bits)) * capacity.middle
            ways.append((number, np.minimum(lacking + np.maximum(need - room, 0), never)))
            if room >= layers:
                break
    places = tuple((bit, room) for bit, room in rooms.items() if room)
    return _Step(places, *_stacked(ways))


def _stacked(ways: list[tuple[int, Ints]]) -> tuple[Floats, Ints]:
    return np.array([[float(taken)] for taken, _ in ways]), np.stack([lacks for _, lacks in ways])


@lru_cache(maxsize=4)
def _lacks(layers: int) -> tuple[Ints, Ints]:
    """State and layers needed of every lack, [4 (L + 1)] each."""
    return np.divmod(np.arange(4 * (layers + 1)), layers + 1)


class Prices:
    """The cheapest way to complete any pipeline with the kinds from each index on, at given weights."""

    def __init__(self, kinds: Kinds, weights: Sequence[float]) -> None:
        self._kinds = kinds
        self._start = BOTH * (kinds.layers + 1) + kinds.layers
        self.weights = list(weights)
        # [T + 1, lacks + 1], the last column for ways that are closed.
        self._costs = np.full((len(self.weights) + 1, self._start + 2), math.inf)
        self._costs[-1, 0] = 0.0
        for kind in range(len(self.weights) - 1, -1, -1):
            step = kinds.steps[kind]
            ways = self._costs[kind + 1].take(step.lacks)
            ways += step.taken * self.weights[kind]
            ways.min(axis=0, out=self._costs[kind, :-1])

    @property
    def cheapest(self) -> float:
        """The weight of the cheapest pattern; infinite if there is none."""
        return float(self._costs[0, self._start])

    def cheapest_with(self, largest: int, limit: float) -> Pattern | None:
        """The cheapest pattern whose largest member is of the kind ``largest``, if it weighs below
        ``limit``.
        """
        step = self._kinds.steps[largest]
        lacks = step.lacks[1:, self._start]
        ways = self._costs[largest + 1].take(lacks) + step.taken[1:, 0] * self.weights[largest]
        way = int(ways.argmin())
        if not ways[way] < limit:
            return None
        members = [largest] * int(step.taken[way + 1, 0])
        lack, kind = int(lacks[way]), largest + 1
        while lack:
            # Costs rise from kind to kind; the last one at which they are still the least is needed.
            least = float(self._costs[kind, lack]) + EPSILON / 2
            kind += int(self._costs[kind:, lack].searchsorted(least, side="right")) - 1
            step = self._kinds.steps[kind]
            ways = self._costs[kind + 1].take(step.lacks[:, lack]) + step.taken[:, 0] * self.weights[kind]
            way = int(ways.argmin())
            members += [kind] * int(step.taken[way, 0])
            lack, kind = int(step.lacks[way, lack]), kind + 1
        return tuple(members)

    @cached_property
    def _table(self) -> list[list[float]]:
        """The costs as plain lists, for reading one value at a time."""
        costs: list[list[float]] = self._costs.tolist()
        return costs

    def patterns(self, largest: int, counts: Sequence[int], limit: float) -> Iterator[Pattern]:
        """Yield the patterns whose largest member is of the kind ``largest`` and that weigh at most
        ``limit``, each once.

        ``counts`` are the peers left of each kind. Members are tried from the largest on, and each in all
        places at once: an unfinished pattern may lack more layers and fewer ends, or the other way round.
        """
        steps, weights, table = self._kinds.steps, self.weights, self._table
        layers, total = self._kinds.layers, len(weights)
        size = layers + 1

        def grow(
            pattern: Pattern, kind: int, used: int, lacks: Sequence[int], weight: float
        ) -> Iterator[Pattern]:
            if 0 in lacks:
                yield pattern
                return
            if len(pattern) >= layers:
                return
            while kind < total and weight + min(map(table[kind].__getitem__, lacks)) <= limit:
                if used < counts[kind]:
                    yield from join(pattern, kind, used + 1, lacks, weight + weights[kind])
                kind, used = kind + 1, 0

        def join(
            pattern: Pattern, kind: int, used: int, lacks: Sequence[int], weight: float
        ) -> Iterator[Pattern]:
            needs: dict[int, int] = {}
            for lack in lacks:
                state, need = divmod(lack, size)
                for bit, room in steps[kind].places:
                    if not bit or state & bit:
                        needs[state - bit] = min(needs.get(state - bit, layers), max(0, need - room))
            left = [state * size + need for state, need in needs.items()]
            # Within a kind the table knows how many there are, not how many are taken.
            row = table[kind if used < counts[kind] else kind + 1]
            if weight + min(map(row.__getitem__, left)) <= limit:
                yield from grow((*pattern, kind), kind, used, left, weight)

        if not counts[largest] or weights[largest] > limit:
            return
        if self._kinds.singles[largest]:
            yield (largest,)
        else:
            yield from join((), largest, 1, [self._start], weights[largest])
