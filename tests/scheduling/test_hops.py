"""Both layouts of ρ: never claiming too much, and all of it once taken in full."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.chains import random_network, way

from p2pllm.scheduling.phase2.hops import DenseHops, Pairs, RegionHops

NO_PAIRS = Pairs(np.zeros(0, dtype=np.intp), np.zeros(0, dtype=np.intp), np.zeros(0))


def made(seed, layout):
    """(hops, ρ as a matrix, F rows of what comes after) for a few peers."""
    rng = random.Random(seed)
    network = random_network(rng, [f"p{number}" for number in range(12)], rng.choice([0.1, 0.4, 1]))
    names = sorted(network.region_of, key=network.region_of.__getitem__)
    regions = sorted(set(network.region_of.values()))
    region = np.array([regions.index(network.region_of[name]) for name in names])
    rho = np.array([[way(network, a, b) for b in names] for a in names])
    after = np.array([[rng.choice([np.inf, rng.uniform(0, 0.1)]) for _ in names] for _ in range(3)])
    if layout is DenseHops:
        return DenseHops(rho, region), rho, after
    typical = np.array([[seconds(network.typical(a, b)) for b in regions] for a in regions])
    both = {pair for a, b in network.measured for pair in ((a, b), (b, a))}
    ends = [(names.index(a), names.index(b)) for a, b in both if a in names and b in names]
    source, target = np.array(ends, dtype=np.intp).reshape(-1, 2).T
    return RegionHops(typical, region, Pairs(source, target, rho[source, target])), rho, after


def seconds(rho):
    """ρ, infinite without an edge."""
    return np.inf if rho is None else rho


def onward(hops, after):
    out = np.empty_like(after)
    hops.onward(after, out)
    return out


@pytest.mark.parametrize("seed", range(30))
def test_a_matrix_is_the_truth(seed):
    hops, rho, after = made(seed, DenseHops)
    assert np.array_equal(onward(hops, after), (rho + after[:, None, :]).min(axis=2))
    assert np.array_equal([hops.claimed(peer) for peer in range(len(rho))], rho)


@pytest.mark.parametrize("seed", range(60))
def test_regions_claim_no_more_than_the_truth(seed):
    hops, rho, after = made(seed, RegionHops)
    everyone = range(len(rho))
    claims = np.array([hops.claimed(peer) for peer in everyone])
    assert (claims <= rho).all()
    own = np.eye(len(rho), dtype=bool)
    best_of_others = (np.where(own, np.inf, claims) + after[:, None, :]).min(axis=2)
    best = (claims + after[:, None, :]).min(axis=2)
    # A hop of a peer to itself may or may not be offered: to stay is never dearer.
    assert (onward(hops, after) <= best_of_others).all()
    assert (onward(hops, after) >= best).all()
    full = hops.in_full(everyone)
    assert np.array_equal([full.claimed(peer) for peer in everyone], rho)
    assert np.array_equal(onward(full, after), (rho + after[:, None, :]).min(axis=2))
    assert np.array_equal([hops.claimed(peer) for peer in everyone], claims), "the one before is as it was"


@pytest.mark.parametrize("layout", [DenseHops, RegionHops])
@pytest.mark.parametrize("seed", range(30))
def test_straight_means_that_no_detour_is_shorter(seed, layout):
    hops, rho, _ = made(seed, layout)
    detours = (rho[:, :, None] + rho[None, :, :]).min(axis=1)
    assert not hops.straight or (detours >= rho).all()


def test_weight_is_what_one_onward_goes_through():
    """A search that may take just so much work counts in it: regions, pairs and full rows alike."""
    few = RegionHops(np.zeros((1, 1)), np.zeros(50, dtype=np.intp), NO_PAIRS)
    many = RegionHops(np.zeros((50, 50)), np.arange(50), NO_PAIRS)
    assert (few.weight, many.weight) == (50 + 1, 50 + 50 * 50)
    one = np.zeros(1, dtype=np.intp)
    pair = RegionHops(np.ones((1, 1)), np.zeros(50, dtype=np.intp), Pairs(one, one + 1, np.zeros(1)))
    assert pair.weight == few.weight + 50
    assert pair.in_full([3, 4]).weight == pair.weight + 2 * 50


def test_regions_are_straight_where_that_is_plain():
    def straight(typical):
        return RegionHops(np.array(typical), np.array([0, 0, 1]), NO_PAIRS).straight

    assert straight([[0.001, 0.05], [0.05, 0.001]])
    assert not straight([[0.3, 0.1], [0.1, 0.3]])
    assert not straight([[np.inf, 0.1], [0.1, 0.001]])
