"""Routes that are kept alive: what was put one by one, who is a vertex, and what an entry chose."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support.chains import random_network, random_swarm

from p2pllm.errors import NoRouteError
from p2pllm.scheduling import Holder, Network, Routes, Stage, find_chain

HERE = Network(dict.fromkeys("abcd", "eu"), same_region_s=0.001)


def routes_of(*holders, layers=4, network=HERE):
    routes = Routes(layers, network)
    for holder in holders:
        routes.put(holder.peer, [holder])
    return routes


def answer(find, *given, **question):
    """What a token costs, or the layers that nobody serves."""
    try:
        return round(find(*given, **question).latency_s, 9)
    except NoRouteError as error:
        return error.missing


def first(chain):
    return chain.stages[0].peer


@pytest.mark.parametrize("seed", range(40))
def test_step_by_step_or_all_at_once_is_the_same(seed):
    """Peers come, change their load or their layers, move, are measured, and go."""
    rng = random.Random(seed)
    layers, holders, _ = random_swarm(rng, most_layers=8)
    network = random_network(rng, sorted({h.peer for h in holders}), 0.3)
    routes = Routes(layers, network)
    present = {}
    for _ in range(25):
        peer = rng.choice(holders).peer
        match rng.choice(["put", "load", "span", "go", "measure", "place"]):
            case "put":
                present[peer] = [h for h in holders if h.peer == peer]
            case "load" if peer in present:
                present[peer] = [replace(h, wait_s=rng.random() / 50) for h in present[peer]]
            case "span" if peer in present:
                present[peer] = [replace(h, start=0) for h in present[peer]][: rng.randint(1, 2)]
            case "measure":
                pair = tuple(rng.sample(["p0", "p1", "p2", "p3"], 2))
                seconds = rng.random() / 50
                routes.mesh.measure(*pair, seconds)
                network = replace(network, measured={**network.measured, pair: seconds})
            case "place":
                routes.mesh.place(peer, "eu")
                network = replace(network, region_of={**network.region_of, peer: "eu"})
            case "go":
                present.pop(peer, None)
        routes.put(peer, present.get(peer, ()))
        everyone = [h for held in present.values() for h in held]
        question = {"entry": rng.choice([None, "p0"]), "expected_tokens": 2}
        one_by_one = answer(routes.find, **question)
        assert one_by_one == answer(find_chain, layers, everyone, network, **question)


def test_a_dropped_peer_is_gone_with_its_latencies():
    routes = routes_of(Holder("a", 0, 4, 1e-3), Holder("b", 0, 4, 2e-3))
    routes.drop("a")
    assert first(routes.find()) == "b"
    routes.put("c", [Holder("c", 0, 2, 1e-4)])
    routes.put("new", [Holder("new", 2, 4, 1e-4)])
    assert [s.peer for s in routes.find().stages] == ["c", "b"], "the new peer is nowhere yet"
    routes.mesh.place("new", "eu")
    assert [s.peer for s in routes.find().stages] == ["c", "new"]


def test_who_was_not_heard_for_three_seconds_is_no_vertex():
    routes = routes_of(Holder("a", 0, 4, 1e-3, heard_s=10.0), Holder("b", 0, 4, 2e-3, heard_s=11.0))
    assert first(routes.find(now=13.0)) == "a"
    assert first(routes.find(now=13.1)) == "b"
    assert first(routes.find(now=13.1, stale_s=5.0)) == "a"
    assert first(routes.find()) == "a", "no time, no staleness"
    with pytest.raises(NoRouteError, match="no peer serves layers 0:4"):
        routes.find(now=20.0)


def test_who_leaves_is_no_vertex_and_no_holder():
    routes = routes_of(Holder("a", 0, 4, 1e-3, leaving=True), Holder("b", 0, 2, 2e-3))
    with pytest.raises(NoRouteError, match="no peer serves layers 2:4"):
        routes.find()
    routes.put("a", [Holder("a", 0, 4, 1e-3)])
    assert first(routes.find()) == "a"


def test_own_choices_make_peers_wait():
    routes = routes_of(Holder("a", 0, 4, 1e-3, head_s=0.002), Holder("b", 0, 4, 2e-3))
    chain = routes.find(waits={"a": 0.006, "stranger": 1.0})
    assert (first(chain), chain.latency_s) == ("b", 0.008)
    chain = routes.find(waits={"a": 0.001})
    assert (first(chain), chain.latency_s) == ("a", pytest.approx(0.007))
    assert first(routes.find()) == "a", "only for that one search"


@pytest.mark.parametrize("part", ["layer_s", "head_s", "wait_s"])
def test_every_part_of_tau_is_spread(part):
    pace = {"layer_s": 0.0, "head_s": 0.0, "wait_s": 0.0}
    routes = routes_of(Holder("a", 0, 4, **pace | {part: 0.1}), Holder("b", 0, 4, **pace | {part: 0.101}))
    rng = random.Random(7)
    chosen = [first(routes.find(rng=rng)) for _ in range(60)]
    assert min(chosen.count("a"), chosen.count("b")) > 10


def test_work_of_a_chain_is_layers_and_head_without_waits():
    routes = Routes(10, HERE)
    pace = {"layer_s": 1e-3, "head_s": 0.5, "wait_s": 3.0}
    routes.put("a", [Holder("a", 0, 3, **pace), Holder("a", 7, 10, **pace)])
    routes.put("b", [Holder("b", 3, 7, 2e-3, head_s=9.0)])
    chain = routes.find()
    assert chain.stages == (Stage("a", 0, 3), Stage("b", 3, 7), Stage("a", 7, 10))
    assert routes.work_s(chain) == {"a": pytest.approx(0.506), "b": pytest.approx(0.008)}


@pytest.mark.parametrize(
    ("holder", "reason"),
    [
        (Holder("a", 2, 2, 1e-3), "no range"),
        (Holder("a", -1, 2, 1e-3), "no range"),
        (Holder("a", 0, 2, -1e-3), "0 or more"),
        (Holder("a", 0, 2, float("nan")), "0 or more"),
        (Holder("a", 0, 2, 1e-3, head_s=float("inf")), "0 or more"),
        (Holder("a", 0, 2, 1e-3, wait_s=-1.0), "0 or more"),
    ],
)
def test_holders_that_make_no_sense_change_nothing(holder, reason):
    routes = routes_of(Holder("a", 0, 4, 1e-3))
    with pytest.raises(ValueError, match=f"peer a: .*{reason}"):
        routes.put("a", [Holder("a", 0, 4, 9.0), holder])
    assert routes.find().latency_s == 0.004


def test_questions_that_make_no_sense():
    with pytest.raises(ValueError, match="at least one layer"):
        Routes(0)
    with pytest.raises(ValueError, match="at least one token"):
        routes_of(Holder("a", 0, 4, 1e-3)).find(entry="a", expected_tokens=0)
