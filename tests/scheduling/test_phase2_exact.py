"""Phase 2 against all ways to give each layer to a holder of it, under any ρ."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from support.chains import (
    big_swarm,
    costs_of,
    is_chain,
    least_cost,
    random_fixed,
    random_network,
    random_swarm,
)

from p2pllm.errors import NoRouteError
from p2pllm.scheduling import Holder, Network, Routes, Stage, find_chain
from p2pllm.scheduling.phase2 import ring


def check(layers, holders, rho, *, fixed=(), **question):
    """The chain is as cheap as any, and costs what it says."""
    best = least_cost(layers, holders, rho, fixed=fixed, **question)
    if best == math.inf:
        with pytest.raises(NoRouteError):
            find_chain(layers, holders, rho, fixed=fixed, **question)
        return
    chain = find_chain(layers, holders, rho, fixed=fixed, **question)
    cost, ring_s = costs_of(chain, holders, rho, **question)
    assert is_chain(chain, layers, holders, fixed)
    assert cost == pytest.approx(best, abs=1e-7)
    assert chain.latency_s == pytest.approx(ring_s, abs=1e-12)
    assert chain.gap_s == 0


@pytest.mark.parametrize("seed", range(300))
def test_best_over_all_assignments_of_layers(seed):
    rng = random.Random(seed)
    layers, holders, network = random_swarm(rng)
    question = {"entry": rng.choice([None, "entry", "p0"]), "expected_tokens": rng.choice([1, 2, 128])}
    check(layers, holders, network, fixed=random_fixed(rng, holders), **question)


@pytest.mark.parametrize("seed", range(150))
def test_best_where_only_regions_are_known(seed):
    """The usual case, in which slice bounds suffice: unlike heads, entries that pay by token."""
    rng = random.Random(seed)
    layers, holders, _ = random_swarm(rng)
    names = [*{h.peer for h in holders}, "entry"]
    places = {region: rng.uniform(0, 0.03) for region in ("ap", "eu", "us")}
    regional = {(a, b): 0.001 + abs(places[a] - places[b]) for a, b in itertools.combinations(places, 2)}
    network = Network({name: rng.choice(list(places)) for name in names}, {}, regional, 0.001)
    check(layers, holders, network, entry=rng.choice([None, "entry", "p0"]), expected_tokens=1)


@pytest.mark.parametrize("seed", range(12))
def test_best_among_many_peers_of_which_some_are_measured(seed):
    """So many that ρ is no matrix: pairs nearer and farther than typical for their regions."""
    holders, network = big_swarm(seed, peers=90, layers=12, pairs=6)
    check(12, holders, network, entry=f"p{seed}", expected_tokens=2)


@pytest.mark.parametrize("seed", range(4))
def test_best_among_many_peers_of_which_one_is_near_to_all(seed):
    holders, network = big_swarm(seed, peers=80, layers=8, pairs=2)
    near = {("p0", h.peer): 1e-4 * (1 + n % 7) for n, h in enumerate(holders) if h.peer != "p0"}
    wide = [Holder("p0", 2, 6, 1e-3), *holders[1:]]
    check(8, wide, Network(network.region_of, {**network.measured, **near}, {}, 0.001, 0.02))


@pytest.mark.parametrize("seed", range(40))
def test_a_severed_hop_is_no_edge(seed):
    rng = random.Random(seed)
    layers, holders, network = random_swarm(rng, measured=(0, 0.5))
    names = sorted({h.peer for h in holders} | {"entry"})
    severed = frozenset(pair for pair in itertools.permutations(names, 2) if rng.random() < 0.3)
    question = {"entry": rng.choice([None, "entry"]), "expected_tokens": 2}

    def rho(a, b):
        return None if (a, b) in severed else network(a, b)

    best = least_cost(layers, holders, rho, **question)
    if best == math.inf:
        with pytest.raises(NoRouteError):
            find_chain(layers, holders, network, severed=severed, **question)
        return
    chain = find_chain(layers, holders, network, severed=severed, **question)
    assert costs_of(chain, holders, rho, **question)[0] == pytest.approx(best, abs=1e-7)


def test_a_severed_hop_among_many_peers():
    holders, network = big_swarm(3, peers=90, layers=12, pairs=3)
    before = find_chain(12, holders, network)
    severed = frozenset(itertools.pairwise(stage.peer for stage in before.stages))

    def rho(a, b):
        return None if (a, b) in severed else network(a, b)

    after = find_chain(12, holders, network, severed=severed)
    assert costs_of(after, holders, rho)[0] == pytest.approx(least_cost(12, holders, rho), abs=1e-7)
    assert after.stages != before.stages


@pytest.mark.parametrize("seed", range(60))
def test_a_search_cut_short_says_by_how_much_it_may_be_off(seed, monkeypatch):
    monkeypatch.setattr(ring, "PASSES", 1)
    rng = random.Random(1000 + seed)
    layers, holders, network = random_swarm(rng, measured=(1,))
    best = least_cost(layers, holders, network)
    if best == math.inf:
        with pytest.raises(NoRouteError):
            find_chain(layers, holders, network)
        return
    chain = find_chain(layers, holders, network)
    cost, _ = costs_of(chain, holders, network)
    assert cost - chain.gap_s - 1e-7 <= best <= cost + 1e-7


@pytest.mark.parametrize("seed", range(30))
def test_a_search_out_of_effort_ends_with_some_ring(seed, monkeypatch):
    """Any pass goes through more than one number: the first is the last that begins."""
    rng = random.Random(2000 + seed)
    layers, holders, network = random_swarm(rng, measured=(1,))
    routes = Routes(layers, network)
    for peer in {holder.peer for holder in holders}:
        routes.put(peer, [holder for holder in holders if holder.peer == peer])

    def chain(**question):
        try:
            return routes.find(**question)
        except NoRouteError:
            return None

    hurried, thorough = chain(effort=1), chain()
    assert chain(effort=1e9) == thorough
    monkeypatch.setattr(ring, "PASSES", 1)
    assert hurried == chain()


def test_a_gap_is_closed_by_more_passes(monkeypatch):
    """``near`` looks best until its way back is known."""
    holders = [Holder("near", 0, 1, 0.001), Holder("far", 0, 1, 0.002), Holder("tail", 1, 2, 0.001)]
    back = {("tail", "near"): 0.05, ("tail", "far"): 0.01}
    network = Network(measured={("near", "tail"): 0.01, ("far", "tail"): 0.01, **back})
    monkeypatch.setattr(ring, "PASSES", 1)
    early = find_chain(2, holders, network)
    assert [stage.peer for stage in early.stages] == ["near", "tail"]
    assert early.latency_s - early.gap_s == pytest.approx(0.001 + 0.01 + 0.001 + 0.01)
    monkeypatch.undo()
    assert find_chain(2, holders, network).gap_s == 0


def test_a_relay_pays_where_the_direct_way_is_the_longer_one():
    """Layer by layer ``b`` could be skipped, but only through it are ``a`` and ``c`` near."""
    holders = [Holder("a", 0, 6, 1e-3), Holder("b", 0, 12, 2e-3), Holder("c", 6, 12, 1e-3)]
    rho = {("a", "b"): 0.001, ("b", "c"): 0.001, ("a", "c"): 0.5, ("c", "a"): 0.001}
    network = Network(measured=rho)
    chain = find_chain(12, holders, network)
    assert [(s.peer, s.end - s.start) for s in chain.stages] in (
        [("a", 5), ("b", 1), ("c", 6)],
        [("a", 6), ("b", 1), ("c", 5)],
    )
    assert chain.latency_s == pytest.approx(0.011 + 0.002 + 0.003)


def test_the_last_layer_may_go_to_a_fast_head():
    holders = [Holder("whole", 0, 8, 1e-3, head_s=0.1), Holder("head", 4, 8, 5e-3, head_s=0.001)]
    network = Network({"whole": "eu", "head": "eu"}, same_region_s=0.001)
    chain = find_chain(8, holders, network)
    assert chain.stages == (Stage("whole", 0, 7), Stage("head", 7, 8))


def test_the_first_layer_may_go_to_a_peer_near_the_entry():
    holders = [Holder("whole", 0, 8, 1e-3), Holder("near", 0, 8, 2e-3)]
    rho = {("me", "near"): 0.0, ("me", "whole"): 1.0, ("whole", "me"): 0.0, ("near", "whole"): 0.001}
    regions = {name: name for name in ("me", "near", "whole")}
    chain = find_chain(8, holders, Network(regions, {}, rho), entry="me", expected_tokens=10)
    assert chain.stages == (Stage("near", 0, 1), Stage("whole", 1, 8))


def test_the_first_layer_may_be_worth_a_hop_where_no_detour_is_shorter():
    """Only ``near`` has the last head, so the ring goes through ``eu`` anyway; its layers are slow."""
    holders = [Holder("near", 0, 8, 0.04), Holder("far", 0, 8, 0.001, head_s=1.0)]
    regions = {"me": "eu", "near": "eu", "far": "us"}
    network = Network(regions, same_region_s=0.001, cross_region_s=0.05)
    chain = find_chain(8, holders, network, entry="me", expected_tokens=1)
    assert chain.stages == (Stage("near", 0, 1), Stage("far", 1, 7), Stage("near", 7, 8))


def test_fixed_stages_stay_as_they_are():
    holders = [
        Holder("a", 0, 12, 1e-3),
        Holder("b", 0, 12, 5e-3, kv_blocks=0, heard_s=0.0),
        Holder("c", 6, 12, 1e-4),
    ]
    network = Network(dict.fromkeys("abc", "eu"), same_region_s=0.001)
    kept = (Stage("b", 2, 5), Stage("a", 5, 6))
    chain = find_chain(12, holders, network, fixed=kept, kv_blocks=1, now=100.0, excluded=frozenset({"b"}))
    assert chain.stages == (Stage("a", 0, 2), *kept, Stage("c", 6, 12))
    assert chain.latency_s == pytest.approx(0.002 + 0.015 + 0.001 + 0.0006 + 4 * 0.001)
    alone = find_chain(12, holders, network, fixed=(Stage("a", 0, 4),), excluded=frozenset({"b", "c"}))
    assert alone.stages == (Stage("a", 0, 4), Stage("a", 4, 12)), "a kept stage is not lengthened"
    whole = (Stage("a", 0, 6), Stage("c", 6, 12))
    assert find_chain(12, holders, network, fixed=whole).stages == whole


def test_fixed_stages_without_a_holder_cost_their_hops():
    """Its peer no longer offers these layers, but it is still there."""
    routes = Routes(4, Network({"gone": "eu", "a": "eu"}, same_region_s=0.001))
    routes.put("a", [Holder("a", 0, 4, 1e-3)])
    chain = routes.find(fixed=(Stage("gone", 0, 2),))
    assert chain.stages == (Stage("gone", 0, 2), Stage("a", 2, 4))
    assert chain.latency_s == pytest.approx(0.002 + 2 * 0.001)
    with pytest.raises(NoRouteError, match="left the swarm"):
        routes.find(fixed=(Stage("nobody", 0, 2),))


@pytest.mark.parametrize("fixed", [[(2, 5), (4, 6)], [(4, 6), (0, 2)], [(0, 13)], [(3, 3)], [(-1, 2)]])
def test_fixed_stages_that_make_no_sense(fixed):
    with pytest.raises(ValueError, match="in order and apart"):
        find_chain(
            12,
            [Holder("a", 0, 12, 1e-3)],
            Network(),
            fixed=[Stage("a", start, end) for start, end in fixed],
        )


@pytest.mark.parametrize("seed", range(30))
def test_the_order_of_holders_does_not_change_what_a_token_costs(seed):
    rng = random.Random(seed)
    layers, holders, _ = random_swarm(rng)
    network = random_network(rng, sorted({h.peer for h in holders}), 0.5)
    found = set()
    for _ in range(4):
        rng.shuffle(holders)
        try:
            found.add(round(find_chain(layers, holders, network).latency_s, 9))
        except NoRouteError:
            found.add(None)
    assert len(found) == 1
