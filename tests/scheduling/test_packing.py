"""s*(k) of one region against exhaustive search and against fleets worked out elsewhere."""

from __future__ import annotations

import math
import random
from collections import Counter
from functools import cache

import pytest

from p2pllm.scheduling import Capacity
from p2pllm.scheduling.phase1 import relaxation
from p2pllm.scheduling.phase1.packing import Packing
from p2pllm.scheduling.phase1.patterns import Kinds, Prices
from p2pllm.scheduling.phase1.relaxation import Relaxation

EFFORT = 5_000


def holds(layers, members):
    """Whether the members are a pipeline: the definition, over all choices of ends."""
    if len(members) == 1:
        return members[0].both >= layers
    if not 2 <= len(members) <= layers or min(member.middle for member in members) < 1:
        return False
    room = sum(member.middle for member in members)
    return any(
        first.first >= 1
        and last.last >= 1
        and room - (first.middle - first.first) - (last.middle - last.last) >= layers
        for i, first in enumerate(members)
        for j, last in enumerate(members)
        if i != j
    )


def by_force(layers, capacities):
    """s*(k) for every feasible k, over all ways to group the peers."""
    everyone = range(1, 1 << len(capacities))
    groups = [
        group for group in everyone if holds(layers, [c for i, c in enumerate(capacities) if group >> i & 1])
    ]

    @cache
    def fewest(free, replicas):
        if replicas == 0:
            return 0
        if free == 0:
            return math.inf
        lowest = free & -free
        return min(
            [fewest(free ^ lowest, replicas)]
            + [
                group.bit_count() + fewest(free ^ group, replicas - 1)
                for group in groups
                if group & lowest and group & free == group
            ]
        )

    found = {}
    while (stages := fewest((1 << len(capacities)) - 1, len(found))) < math.inf:
        found[len(found)] = stages
    return found


def random_capacities(rng, layers):
    """Up to seven peers: equal at all places, with a loss at the ends, or with any ends at all."""
    style = rng.randrange(3)
    for _ in range(rng.randint(1, 7)):
        middle = rng.randint(0, rng.choice([layers, layers // 2 + 1, layers + 3]))
        lost = rng.randint(0, 2)
        if style == 0:
            yield Capacity.same(middle)
        elif style == 1:
            yield Capacity(middle, max(0, middle - lost), max(0, middle - lost), max(0, middle - 2 * lost))
        else:
            yield Capacity(middle, *(rng.randint(0, middle) for _ in range(3)))


@pytest.mark.parametrize("seed", range(300))
def test_fewest_stages_for_every_number_of_replicas(seed):
    rng = random.Random(seed)
    layers = rng.randint(1, 12)
    capacities = list(random_capacities(rng, layers))
    packing = Packing(layers, capacities, effort=EFFORT)
    for replicas in range(packing.most + 1):
        packing.solve(replicas)
    expected = by_force(layers, capacities)
    assert packing.most == max(expected)
    assert {k: packing.stages(k) for k in range(packing.most + 1)} == expected
    assert packing.lower.tolist() == list(expected.values())
    for replicas in expected:
        used = Counter(kind for pattern in packing.found[replicas] for kind in pattern)
        assert all(used[kind] <= count for kind, count in enumerate(packing.kinds.counts))
        for pattern in packing.found[replicas]:
            assert holds(layers, [packing.kinds.capacities[kind] for kind in pattern])


@pytest.mark.parametrize("seed", range(100))
def test_any_weights_give_a_true_bound(seed):
    """s*(k) >= k · cheapest pattern - Σ (weight - 1), which is what every certificate rests on."""
    rng = random.Random(seed)
    layers = rng.randint(1, 10)
    capacities = list(random_capacities(rng, layers))
    kinds = Kinds.of(layers, capacities)
    weights = [rng.uniform(1, 5) for _ in kinds.counts]
    cheapest = Prices(kinds, weights).cheapest
    base = sum(count * (weight - 1) for count, weight in zip(kinds.counts, weights, strict=True))
    for replicas, stages in by_force(layers, capacities).items():
        assert replicas == 0 or stages >= replicas * cheapest - base - 1e-9


@pytest.mark.parametrize("seed", range(60))
def test_prices_find_the_patterns_within_a_limit(seed):
    rng = random.Random(seed)
    layers = rng.randint(1, 10)
    capacities = list(random_capacities(rng, layers))
    kinds = Kinds.of(layers, capacities)
    weights = [rng.uniform(1, 5) for _ in kinds.counts]
    prices = Prices(kinds, weights)
    limit = prices.cheapest * 1.3 if prices.cheapest < math.inf else 10.0
    found = {
        pattern
        for largest in range(len(kinds.counts))
        for pattern in prices.patterns(largest, kinds.counts, limit)
    }
    everything = minimal_patterns(kinds)
    weight = {pattern: sum(weights[kind] for kind in pattern) for pattern in everything}
    assert min(weight.values(), default=math.inf) == pytest.approx(prices.cheapest)
    assert {p for p in everything if weight[p] <= limit - 1e-9} <= found
    assert all(holds(layers, [kinds.capacities[kind] for kind in pattern]) for pattern in found)


def minimal_patterns(kinds):
    """Patterns that no longer hold a replica without any one member."""
    members = [kind for kind, count in enumerate(kinds.counts) for _ in range(count)]
    fits = {}
    for group in range(1, 1 << len(members)):
        pattern = tuple(kind for i, kind in enumerate(members) if group >> i & 1)
        fits[pattern] = holds(kinds.layers, [kinds.capacities[kind] for kind in pattern])
    return {
        pattern
        for pattern, fit in fits.items()
        if fit and not any(fits.get(pattern[:i] + pattern[i + 1 :], False) for i in range(len(pattern)))
    }


MIXES = {
    "equal": [22],
    "mix2": [22, 22, 22, 22, 22, 17, 17],
    "mix4": [57, 28, 22, 17],
    "mix8": [57, 34, 28, 25, 22, 20, 17, 14],
}


@pytest.mark.parametrize(("mix", "peers", "replicas", "stages"), [("mix2", 16, 5, 16), ("mix8", 16, 6, 15)])
def test_published_fleets(mix, peers, replicas, stages):
    """What a dynamic programme over all residuals finds for 64 layers, in minutes."""
    capacities = [Capacity.same(MIXES[mix][i % len(MIXES[mix])]) for i in range(peers)]
    packing = Packing(64, capacities, effort=EFFORT)
    for k in range(packing.most + 1):
        packing.solve(k)
    assert packing.most == replicas
    assert packing.stages(replicas) == packing.lower[replicas] == stages


def test_equal_peers_by_hand():
    """Three of 22 layers hold 64, two do not: 256 of them are 85 replicas, whatever their sum says."""
    packing = Packing(64, [Capacity.same(22)] * 256, effort=EFFORT)
    packing.solve(packing.most)
    assert packing.most == 85
    assert packing.stages(85) == packing.lower[85] == 255


@pytest.mark.parametrize("mix", ["mix4", "mix8"])
def test_large_fleets_are_proven(mix):
    rng = random.Random(3)
    capacities = [Capacity.same(rng.choice(MIXES[mix])) for _ in range(128)]
    packing = Packing(64, capacities, effort=EFFORT)
    while packing.most not in packing.found:
        packing.solve(packing.most)
    assert packing.stages(packing.most) == packing.lower[packing.most]


def test_the_relaxation_is_a_relaxation():
    """Two replicas of two and a half peers each: 5 of 4 layers for L = 10 are 2 in parts, 1 in whole."""
    kinds = Kinds.of(10, [Capacity.same(4)] * 5)
    relaxed = Relaxation(kinds).solve(2)
    assert sum(relaxed.usage.values()) == pytest.approx(5 / 3)
    packing = Packing(10, [Capacity.same(4)] * 5, effort=EFFORT)
    packing.solve(1)
    assert (packing.most, packing.stages(1)) == (1, 3)


def test_what_the_effort_does_not_reach_stays_open():
    """Without any effort nothing is searched, and the bound says so."""
    rng = random.Random(31)
    capacities = [Capacity.same(rng.randint(5, 60)) for _ in range(48)]
    full, none = (Packing(64, capacities, effort=effort) for effort in (EFFORT, 0))
    for packing in (full, none):
        packing.solve(full.most)
    assert full.stages(full.most) == full.lower[full.most]
    assert none.most >= full.most
    assert none.stages(full.most) >= full.stages(full.most) >= none.lower[full.most]


@pytest.mark.parametrize("pivots", [0, 10, 40, 100])
def test_a_relaxation_that_is_cut_short_bounds_and_places_all_the_same(pivots, monkeypatch):
    rng = random.Random(pivots)
    capacities = [
        Capacity(c, *(rng.randint(0, c) for _ in range(3))) for c in rng.choices(range(5, 60), k=40)
    ]
    full = Packing(64, capacities, effort=EFFORT)
    while full.most not in full.found:
        full.solve(full.most)
    rows = len(full.kinds.counts) + 1
    monkeypatch.setattr(relaxation, "MAX_WORK", pivots * rows**2)
    short = Packing(64, capacities, effort=EFFORT)
    for replicas in range(short.most, -1, -1):
        short.solve(replicas)
    assert max(short.found) > full.most / 2
    assert short.most >= full.most
    assert short.lower[full.most] <= full.stages(full.most)
    for patterns in short.found.values():
        used = Counter(kind for pattern in patterns for kind in pattern)
        assert all(used[kind] <= count for kind, count in enumerate(short.kinds.counts))
        assert all(holds(64, [short.kinds.capacities[kind] for kind in pattern]) for pattern in patterns)


def test_no_proof_from_patterns_that_were_not_all_seen():
    """So many patterns, each in so many orders, that the search sees only some. HiGHS finds 15 stages."""
    capacities = [
        *((4, 2, 4, 0), (11, 9, 1, 5), (16, 15, 11, 0), (15, 7, 10, 2), (10, 1, 7, 5), (9, 1, 2, 8)),
        *((15, 12, 1, 8), (16, 1, 3, 10), (3, 3, 1, 3), (2, 2, 0, 0), (15, 0, 14, 5), (14, 12, 0, 11)),
        *((16, 8, 16, 5), (15, 3, 11, 2), (14, 12, 6, 0), (14, 11, 12, 13), (5, 0, 1, 5), (3, 0, 3, 2)),
        (16, 14, 7, 4),
    ]
    packing = Packing(64, [Capacity(*some) for some in capacities], effort=1000)
    packing.solve(3)
    assert packing.lower[3] <= 15 <= packing.stages(3)


def test_nobody_can_serve():
    for capacities in ([], [Capacity.same(0)], [Capacity(5, 0, 5, 0)], [Capacity(3, 3, 3, 3)]):
        packing = Packing(8, capacities, effort=EFFORT)
        packing.solve(1)
        assert packing.most == 0
        assert packing.stages(1) == math.inf
