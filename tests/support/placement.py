"""What Phase 1 and 2 ought to find, by trying everything: for a handful of peers and layers only.

Written to be plainly right rather than fast, from the rules and not from the code under test.
"""

from __future__ import annotations

import itertools
import math
import random
from functools import cache
from statistics import fmean

from p2pllm.scheduling import Capacity, Holder, Network, Offer


def random_cluster(seed, *, most_peers=9, most_layers=12):
    """(layers, offers, network): unlike ends, capacities from 0, 1–3 regions, some pairs measured."""
    rng = random.Random(seed)
    layers = rng.randint(1, most_layers)
    names = [f"p{number}" for number in range(max(rng.randint(1, most_peers) for _ in range(2)))]
    regions = ["ap", "eu", "us"][: rng.randint(1, 3)]
    # On average the fleet holds the model from half a time to five times.
    largest = min(layers + 1, round(layers * rng.uniform(1, 10) / len(names)))
    unlike_ends = rng.random() < 0.6
    offers = []
    for name in names:
        middle = rng.randint(0, largest)
        first, last = (max(0, middle - rng.randint(0, 2) * unlike_ends) for _ in range(2))
        both = max(0, first + last - middle)
        offers.append(
            Offer(
                name,
                rng.choice(regions),
                Capacity(middle, first, last, both),
                layer_s=rng.choice([1e-3, 2e-3, rng.uniform(5e-4, 5e-3)]),
                head_s=rng.choice([0.0, rng.uniform(0, 5e-3)]),
            )
        )
    pairs = [pair for pair in itertools.permutations(names, 2) if rng.random() < 0.3]
    network = Network(
        region_of={offer.peer: offer.region for offer in offers},
        measured={pair: rng.uniform(0, 0.08) for pair in pairs},
        regional={pair: rng.uniform(0.01, 0.05) for pair in itertools.combinations(regions, 2)},
        same_region_s=rng.choice([0.0, 1e-3, 5e-3]),
    )
    return layers, offers, network


def rooms(offers):
    """Layers that fit on each stage of a pipeline of these peers in this order."""
    ends = {0, len(offers) - 1}
    return [
        offer.capacity.at(is_first=place == 0, is_last=place == max(ends))
        for place, offer in enumerate(offers)
    ]


def holds(layers, offers):
    """Whether these peers, each used, can cover the layers in this order."""
    return len(offers) <= layers and min(rooms(offers)) >= 1 and sum(rooms(offers)) >= layers


def subsets(items):
    return itertools.chain.from_iterable(itertools.combinations(items, n) for n in range(len(items) + 1))


def fewest_stages_by_force(layers, offers):
    """s*(k) for each feasible k ≥ 1: every way to leave peers out and to put the others into pipelines."""

    @cache
    def is_pipeline(group):
        chosen = [offers[index] for index in group]
        if len({offer.region for offer in chosen}) > 1:
            return False
        if len(chosen) == 1:
            return holds(layers, chosen)
        return any(
            holds(layers, [first, *(o for o in chosen if o is not first and o is not last), last])
            for first, last in itertools.permutations(chosen, 2)
        )

    @cache
    def fewest(peers):
        if not peers:
            return {0: 0}
        one, *others = peers
        found = dict(fewest(tuple(others)))  # without the first of them
        for mates in subsets(others):
            if is_pipeline((one, *mates)):
                for k, stages in fewest(tuple(peer for peer in others if peer not in mates)).items():
                    found[k + 1] = min(stages + 1 + len(mates), found.get(k + 1, math.inf))
        return found

    found = fewest(tuple(range(len(offers))))
    return {k: found[k] for k in sorted(found) if k}


def cross_region_by_force(layers, offers, rho):
    """(crossings, seconds of them, stages) of the best pipeline over all regions, None when there is none.

    Best is by fewest, then cheapest hops between regions on the ring, then by fewest stages.
    """

    def hop(source, target):
        crosses = source.region != target.region
        return (1, rho(source.peer, target.peer)) if crosses else (0, 0.0)

    @cache
    def way(first, last, between):
        """The best way from one peer to another through all of some others, in any order."""
        if not between:
            return hop(offers[first], offers[last])
        return min(
            add(way(first, before, between - {before}), hop(offers[before], offers[last]))
            for before in between
        )

    best = None
    for group in subsets(range(len(offers))):
        for first, last in itertools.permutations(group, 2):
            between = frozenset(group) - {first, last}
            if holds(layers, [offers[first], *(offers[i] for i in between), offers[last]]):
                ring = add(way(first, last, between), hop(offers[last], offers[first]))
                found = (*ring, len(group))
                best = found if best is None else min(best, found)
    return best


def add(left, right):
    return tuple(a + b for a, b in zip(left, right, strict=True))


def estimates(layers, offers, network):
    """(r_RTT, T_comp) as they are unless an operator says otherwise."""
    near = [network(a.peer, b.peer) for a, b in itertools.permutations(offers, 2) if a.region == b.region]
    return fmean(near) if near else 0.0, fmean(layers * o.layer_s + o.head_s for o in offers)


def z_of(objective, k, stages, *, alpha, r_rtt_s, t_comp_s):
    """Z(k) by Eq 2 as written, or by the paper's text."""
    if objective == "ratio":
        return k**alpha / (t_comp_s + stages / k * r_rtt_s)
    return k - (stages / k * r_rtt_s) / t_comp_s


def holders_of(plan, offers):
    """What Phase 2 sees once the plan is carried out."""
    by_peer = {offer.peer: offer for offer in offers}
    slices = [part for pipeline in plan.pipelines for part in pipeline.slices] + list(plan.spares)
    return [Holder(s.peer, s.start, s.end, by_peer[s.peer].layer_s, by_peer[s.peer].head_s) for s in slices]


def cheapest_token_by_force(layers, holders, rho, *, entry=None, expected_tokens=128):
    """Seconds per token, entry's share included, of the best of all ways to give each layer to a holder."""

    def entry_share(source, target):
        return 0.0 if entry is None else rho(source, target) / expected_tokens

    best = math.inf
    for first in holders:
        cost = dict.fromkeys(holders, math.inf)
        if first.start == 0:
            cost[first] = entry_share(entry, first.peer) + first.wait_s + first.layer_s
        for layer in range(1, layers):
            cost = {
                h: h.layer_s
                + min(cost[g] + (0.0 if g is h else rho(g.peer, h.peer) + h.wait_s) for g in holders)
                if h.start <= layer < h.end
                else math.inf
                for h in holders
            }
        for last in holders:
            ring = cost[last] + last.head_s + rho(last.peer, first.peer)
            best = min(best, ring + entry_share(last.peer, entry))
    return best


def check_plan(layers, offers, plan):
    """Assert that a plan can be carried out and says what it does."""
    by_peer = {offer.peer: offer for offer in offers}
    used = [part.peer for pipeline in plan.pipelines for part in pipeline.slices]
    used += [part.peer for part in plan.spares]
    assert len(set(used)) == len(used), "a peer is used twice"
    for pipeline in plan.pipelines:
        members = [by_peer[part.peer] for part in pipeline.slices]
        bounds = [0, *(part.end for part in pipeline.slices)]
        assert [part.start for part in pipeline.slices] == bounds[:-1], "slices do not join"
        assert bounds[-1] == layers
        assert set(pipeline.regions) == {member.region for member in members}
        for part, room in zip(pipeline.slices, rooms(members), strict=True):
            assert 1 <= part.end - part.start <= room, "a slice does not fit its place"
    for spare in plan.spares:
        room = by_peer[spare.peer].capacity.at(is_first=spare.start == 0, is_last=spare.end == layers)
        assert 0 <= spare.start < spare.end <= layers
        assert spare.end - spare.start <= room
    assert plan.k == len(plan.pipelines)
    assert plan.stages == sum(len(pipeline.slices) for pipeline in plan.pipelines)
    rings = [[by_peer[part.peer].region for part in pipeline.slices] for pipeline in plan.pipelines]
    assert plan.crossings == sum(
        a != b for ring in rings for a, b in zip(ring, ring[1:] + ring[:1], strict=True)
    )
    assert plan.crossings == 0 or plan.k == 1
    chosen = {candidate.k: candidate for candidate in plan.candidates}[plan.k]
    assert (chosen.stages, chosen.z) == (plan.stages, plan.z)
