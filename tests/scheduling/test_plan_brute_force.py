"""Both phases against exhaustive search, on random clusters of up to nine peers and twelve layers."""

from __future__ import annotations

import math
import random
import re
from itertools import pairwise

import pytest
from support.placement import (
    cheapest_token_by_force,
    check_plan,
    cross_region_by_force,
    estimates,
    fewest_stages_by_force,
    holders_of,
    random_cluster,
    z_of,
)

from p2pllm.errors import ModelError
from p2pllm.scheduling import find_chain
from p2pllm.scheduling.phase1 import place
from p2pllm.scheduling.phase1.objective import Goal


def random_goal(rng):
    return Goal(
        objective=rng.choice(["linear", "linear", "ratio"]),
        alpha=rng.choice([1.0, rng.uniform(0.2, 2.0)]),
        r_rtt_s=rng.choice([None, rng.uniform(0, 0.1)]),
        t_comp_s=rng.choice([None, rng.uniform(1e-3, 0.1)]),
    )


def token_s(chain, holders, rho, entry, expected_tokens):
    """(ring, ring with the entry's share) of a chain, after seeing that it covers the layers."""
    ring = 0.0
    for stage in chain.stages:
        held = [h for h in holders if h.peer == stage.peer and h.start <= stage.start < stage.end <= h.end]
        assert held, f"{stage} is not held"
        ring += held[0].wait_s + (stage.end - stage.start) * held[0].layer_s
    peers = [stage.peer for stage in chain.stages]
    ring += held[0].head_s + sum(rho(a, b) for a, b in pairwise([*peers, peers[0]]))
    share = 0.0 if entry is None else (rho(entry, peers[0]) + rho(peers[-1], entry)) / expected_tokens
    return ring, ring + share


def crossing_s(plan, network):
    """Seconds that the ring of the one pipeline spends between regions."""
    peers = [part.peer for part in plan.pipelines[0].slices]
    ring = pairwise([*peers, peers[0]])
    return sum(network(a, b) for a, b in ring if network.region_of[a] != network.region_of[b])


@pytest.mark.parametrize("seed", range(500))
def test_both_phases_are_optimal(seed):
    layers, offers, network = random_cluster(seed)
    rng = random.Random(seed)
    goal = random_goal(rng)
    fewest = fewest_stages_by_force(layers, offers)
    across = None
    if not fewest:
        across = cross_region_by_force(layers, offers, network)
    if not fewest and not across:
        with pytest.raises(ModelError) as caught:
            place(layers, offers, network, goal=goal)
        missing = re.search(r"(\d+) layers? (is|are) missing", str(caught.value))
        assert missing is not None
        assert 1 <= int(missing[1]) <= layers
        return

    plan = place(layers, offers, network, goal=goal)
    check_plan(layers, offers, plan)
    r_rtt_s, t_comp_s = estimates(layers, offers, network)
    assert plan.r_rtt_s == pytest.approx(r_rtt_s if goal.r_rtt_s is None else goal.r_rtt_s)
    assert plan.t_comp_s == pytest.approx(t_comp_s if goal.t_comp_s is None else goal.t_comp_s)
    if across:
        crossings, seconds, stages = across
        assert (plan.crossings, plan.k) == (crossings, 1)
        assert crossing_s(plan, network) == pytest.approx(seconds)
        fewest = {1: stages}
    z = {
        k: z_of(goal.objective, k, s, alpha=goal.alpha, r_rtt_s=plan.r_rtt_s, t_comp_s=plan.t_comp_s)
        for k, s in fewest.items()
    }
    assert {c.k: c.stages for c in plan.candidates} == fewest
    assert {c.k: c.stages_bound for c in plan.candidates} == fewest
    assert {c.k: c.z for c in plan.candidates} == pytest.approx(z)
    best = max(z.values())
    assert plan.z == pytest.approx(best)
    assert plan.z_bound == pytest.approx(best)
    # Of equals the one with fewer stages.
    assert plan.stages == min(fewest[k] for k in z if math.isclose(z[k], best))

    holders = holders_of(plan, offers)
    entry, tokens = rng.choice([None, *(o.peer for o in offers)]), rng.choice([1, 16, 128])
    chain = find_chain(layers, holders, network, entry=entry, expected_tokens=tokens)
    ring, cost = token_s(chain, holders, network, entry, tokens)
    assert chain.latency_s == pytest.approx(ring)
    least = cheapest_token_by_force(layers, holders, network, entry=entry, expected_tokens=tokens)
    assert cost == pytest.approx(least, abs=1e-7)
