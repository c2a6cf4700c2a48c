"""What Phase 2 ought to find: the best of all ways to give each single layer to a holder of it.

Written from the definition of a chain's cost, not from the code under test.
"""

from __future__ import annotations

import itertools
import math
import random

import numpy as np

from p2pllm.scheduling import Holder, Network, Stage


def way(rho, source, target):
    """ρ in seconds: 0 to itself, infinite without an edge."""
    seconds = 0.0 if source == target else rho(source, target)
    return math.inf if seconds is None else seconds


def least_cost(layers, holders, rho, *, entry=None, expected_tokens=128, fixed=()):
    """Seconds per token, the entry's share included, of the best assignment of layers; inf: there is none.

    For each holder of the first layer, layer by layer, the least cost of everything so far by who works on
    that layer. A fixed stage is a holder of just its layers, which then nobody else may have.
    """
    kept = [next(h for h in holders if h.peer == stage.peer) for stage in fixed]
    everyone = [*holders, *kept]
    ranges = [(h.start, h.end) for h in holders] + [(s.start, s.end) for s in fixed]
    may = np.array([[start <= layer < end for start, end in ranges] for layer in range(layers)])
    for stage in fixed:
        may[stage.start : stage.end, : len(holders)] = False
    peers = [h.peer for h in everyone]
    ways = np.array([[way(rho, a, b) for b in peers] for a in peers])
    wait, layer_s, head_s = (
        np.array([getattr(h, name) for h in everyone]) for name in ("wait_s", "layer_s", "head_s")
    )
    enter, leave = np.zeros(len(peers)), np.zeros(len(peers))
    if entry is not None:
        enter = np.array([way(rho, entry, peer) for peer in peers]) / expected_tokens
        leave = np.array([way(rho, peer, entry) for peer in peers]) / expected_tokens
    best = math.inf
    for first in np.flatnonzero(may[0]):
        cost = np.full(len(peers), math.inf)
        cost[first] = enter[first] + wait[first] + layer_s[first]
        for layer in range(1, layers):
            moved = (cost[:, None] + ways).min(axis=0) + wait
            cost = np.where(may[layer], np.minimum(cost, moved) + layer_s, math.inf)
        best = min(best, (cost + head_s + ways[:, first] + leave).min())
    return float(best)


def costs_of(chain, holders, rho, *, entry=None, expected_tokens=128):
    """(seconds per token with the entry's share, around the ring alone) of a chain, by the definition.

    Spans of one peer cost the same, so any will do.
    """
    by_peer = {h.peer: h for h in holders}
    held = [by_peer[stage.peer] for stage in chain.stages]
    ring = held[-1].head_s
    for stage, holder in zip(chain.stages, held, strict=True):
        ring += holder.wait_s + (stage.end - stage.start) * holder.layer_s
    peers = [stage.peer for stage in chain.stages]
    ring += sum(way(rho, a, b) for a, b in itertools.pairwise([*peers, peers[0]]))
    if entry is None:
        return ring, ring
    return ring + (way(rho, entry, peers[0]) + way(rho, peers[-1], entry)) / expected_tokens, ring


def is_chain(chain, layers, holders, fixed=()):
    """Whether the stages are in order, lie in slices that are held, and keep to the fixed ones."""
    bounds = [0, *(stage.end for stage in chain.stages)]
    return (
        [stage.start for stage in chain.stages] == bounds[:-1]
        and bounds[-1] == layers
        and all(
            any(h.peer == s.peer and h.start <= s.start < s.end <= h.end for h in holders)
            for s in chain.stages
        )
        and set(fixed) <= set(chain.stages)
    )


def random_swarm(rng, *, most_peers=9, most_layers=12, measured=(0, 0.1, 0.5, 1)):
    """(layers, holders, network): overlapping slices, several spans, waits, unlike heads, any ρ at all."""
    layers = rng.randint(1, most_layers)
    names = [f"p{number}" for number in range(rng.randint(1, most_peers))]
    scale = rng.choice([0.0, 0.2, 1.0, 5.0])
    holders = []
    for name in names:
        pace = {
            "layer_s": rng.choice([1e-3, 2e-3, 5e-3]) * rng.uniform(0.5, 2) * scale,
            "head_s": rng.choice([0.0, rng.uniform(0, 0.02)]),
            "wait_s": rng.choice([0.0, 0.0, rng.uniform(0, 0.02)]),
        }
        for _ in range(rng.choice([1, 1, 2])):
            start = rng.choice([0, rng.randrange(layers), rng.randrange(layers)])
            end = rng.choice([layers, rng.randint(start + 1, layers)])
            holders.append(Holder(name, start, end, **pace))
    return layers, holders, random_network(rng, [*names, "entry"], rng.choice(measured))


def random_network(rng, names, measured):
    """ρ of any kind: no metric, unlike in the two directions, edges missing; ``measured`` pairs of all."""
    regions = ["ap", "eu", "us"][: rng.randint(1, 3)]
    said = rng.choice([0, 0.5, 1])

    def seconds():
        return rng.choice([None, *[rng.uniform(0, 0.06) * rng.choice([0.05, 1])] * 9])

    return Network(
        region_of={name: rng.choice(regions) for name in names if rng.random() < 0.9},
        measured={pair: seconds() for pair in itertools.permutations(names, 2) if rng.random() < measured},
        regional={pair: seconds() for pair in itertools.product(regions, repeat=2) if rng.random() < said},
        same_region_s=rng.choice([None, 0.0, 0.001, 0.02]),
        cross_region_s=rng.choice([None, 0.01, 0.05, 0.05]),
    )


def random_fixed(rng, holders):
    """Some stages that these holders could keep, in order and apart."""
    fixed = []
    reached = 0
    for _ in range(rng.randint(0, 2)):
        able = [h for h in holders if h.end > reached]
        if not able:
            break
        holder = rng.choice(able)
        start = rng.randrange(max(reached, holder.start), holder.end)
        fixed.append(Stage(holder.peer, start, rng.randint(start + 1, holder.end)))
        reached = fixed[-1].end
    return tuple(fixed)


def big_swarm(seed, *, peers, layers, pairs):
    """(holders, network): regions, pipelines of about three stages, and ``pairs`` measured from each peer."""
    rng = random.Random(seed)
    region_of = {f"p{number}": rng.choice(["eu", "us"]) for number in range(peers)}
    holders = []
    for peer in region_of:
        size = rng.randint(layers // 4, layers // 2)
        start = rng.choice([0, layers - size, rng.randint(0, layers - size)])
        waits = rng.choice([0.0, rng.uniform(0, 5e-3)])
        holders.append(Holder(peer, start, start + size, rng.choice([1e-3, 1.1e-3, 2e-3]), 1e-3, waits))
    measured = {
        (a, b): (0.001 if region_of[a] == region_of[b] else 0.02) * rng.lognormvariate(0, 0.5)
        for a in region_of
        for b in rng.sample(list(region_of), pairs)
        if a != b
    }
    return holders, Network(region_of, measured, {}, 0.001, 0.02)
