"""A mesh says what a Network of the same figures says, whatever was changed on the way there."""

from __future__ import annotations

import math
import pickle
import random

import numpy as np
import pytest
from support.chains import random_network, way

from p2pllm.scheduling import Mesh, Network

NAMES = [f"p{number}" for number in range(7)]
REGIONS = ["ap", "eu", "us"]


def assert_same(mesh, network):
    """Every pair, by each way to ask; peers that the mesh does not know are nowhere."""
    assert mesh.network() == network
    known = [name for name in NAMES if mesh.known(name) >= 0]
    known.sort(key=lambda name: mesh.regions(np.array([mesh.known(name)]))[0])
    numbers = np.array([mesh.known(name) for name in known], dtype=np.intp)
    hops = mesh.hops(numbers)
    for row, a in enumerate(known):
        assert mesh.name(mesh.known(a)) == a
        expected = [way(network, a, b) for b in known]
        assert [hops.rho(row, column) for column in range(len(known))] == expected
        assert mesh.way(a, numbers).tolist() == expected
        assert mesh.way(a, numbers, back=True).tolist() == [way(network, b, a) for b in known]
    assert mesh.way("nobody", numbers).tolist() == [math.inf] * len(known)


@pytest.mark.parametrize("seed", range(60))
def test_it_starts_as_the_network_it_is_given(seed):
    rng = random.Random(seed)
    network = random_network(rng, NAMES, rng.choice([0, 0.2, 1]))
    assert_same(Mesh(network), network)


class Changes:
    """Random changes to a mesh, and the same to plain dictionaries."""

    def __init__(self, rng):
        self.rng = rng
        self.region_of, self.measured, self.regional = {}, {}, {}
        self.mesh = Mesh(Network(same_region_s=0.001, cross_region_s=0.05))

    def network(self):
        return Network(self.region_of, self.measured, self.regional, 0.001, 0.05)

    def place(self):
        peer, region = self.rng.choice(NAMES), self.rng.choice([*REGIONS, None])
        self.mesh.place(peer, region)
        self.region_of.pop(peer, None)
        if region is not None:
            self.region_of[peer] = region

    def measure(self):
        pair, seconds = tuple(self.rng.sample(NAMES, 2)), self.rng.choice([None, self.rng.random()])
        self.mesh.measure(*pair, seconds)
        self.measured[pair] = seconds

    def unmeasure(self):
        pair = self.rng.choice([*self.measured, tuple(self.rng.sample(NAMES, 2))])
        self.mesh.unmeasure(*pair)
        self.measured.pop(pair, None)

    def typical(self):
        pair, seconds = (self.rng.choice(REGIONS), self.rng.choice(REGIONS)), self.rng.random()
        self.mesh.typical(*pair, seconds)
        self.regional[pair] = seconds

    def untypical(self):
        pair = self.rng.choice(REGIONS), self.rng.choice(REGIONS)
        self.mesh.untypical(*pair)
        self.regional.pop(pair, None)

    def drop(self):
        peer = self.rng.choice(NAMES)
        self.mesh.drop(peer)
        self.region_of.pop(peer, None)
        for pair in [pair for pair in self.measured if peer in pair]:
            del self.measured[pair]


@pytest.mark.parametrize("seed", range(40))
def test_it_follows_any_changes(seed):
    rng = random.Random(seed)
    changes = Changes(rng)
    for _ in range(12):
        for _ in range(5):
            getattr(
                changes, rng.choice(["place", "measure", "measure", "unmeasure", "typical", "untypical"])
            )()
        if rng.random() < 0.3:
            changes.drop()
        assert_same(changes.mesh, changes.network())


@pytest.mark.parametrize("seed", range(20))
def test_its_version_tells_of_every_change(seed):
    rng = random.Random(seed)
    changes = Changes(rng)
    for _ in range(60):
        before = {(a, b): changes.network()(a, b) for a in NAMES for b in NAMES}
        version = changes.mesh.version
        getattr(changes, rng.choice(["place", "measure", "unmeasure", "typical", "untypical", "drop"]))()
        after = {(a, b): changes.network()(a, b) for a in NAMES for b in NAMES}
        assert changes.mesh.version > version or before == after


def test_what_is_said_again_is_no_change():
    mesh = Mesh(Network({"a": "eu", "b": "eu"}, {("a", "b"): 0.1}, {("eu", "us"): 0.2}, 0.001))
    version = mesh.version
    mesh.place("a", "eu")
    mesh.measure("a", "b", 0.1)
    mesh.typical("eu", "us", 0.2)
    mesh.unmeasure("b", "a")
    mesh.untypical("us", "eu")
    assert mesh.version == version


def test_numbers_of_dropped_peers_are_used_again():
    mesh = Mesh()
    for number in range(50):
        mesh.place(f"p{number}", f"region {number}")
        mesh.measure(f"p{number}", "hub", 0.1)
        mesh.drop(f"p{number}")
    mesh.place("new", "new region")
    assert mesh.number("new") < 3
    assert mesh.regions(np.array([mesh.number("new")])) < 3
    mesh.drop("new")
    assert mesh.network() == Network()


def test_what_is_gone_takes_no_memory():
    mesh = Mesh()
    sizes = []
    for number in range(100, 300):
        mesh.place(f"p{number}", f"region {number}")
        mesh.measure(f"p{number}", "hub", 0.1)
        mesh.drop(f"p{number}")
        sizes.append(len(pickle.dumps(mesh)))
    assert sizes[-1] < sizes[0] + 20


def test_a_severed_hop_is_cut_in_one_direction_only():
    mesh = Mesh(Network({"a": "eu", "b": "eu"}, same_region_s=0.001))
    numbers = np.array([mesh.known("a"), mesh.known("b")])
    hops = mesh.hops(numbers, {("a", "b"), ("a", "nobody"), ("nobody", "b")})
    assert (hops.rho(0, 1), hops.rho(1, 0)) == (math.inf, 0.001)


@pytest.mark.parametrize("seconds", [-0.001, math.nan])
def test_what_no_latency_can_be(seconds):
    for make in (
        lambda: Mesh(Network(measured={("a", "b"): seconds})),
        lambda: Mesh(Network(regional={("eu", "us"): seconds})),
        lambda: Mesh(Network(same_region_s=seconds)),
        lambda: Mesh().measure("a", "b", seconds),
        lambda: Mesh().typical("eu", "us", seconds),
    ):
        with pytest.raises(ValueError, match="0 or more seconds"):
            make()
