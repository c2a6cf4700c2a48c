"""ρ between any two peers, from what all of them measured."""

from __future__ import annotations

import itertools
import random
from statistics import median

import pytest
from support.bodies import metrics_body, peer_body

from p2pllm.records import MetricsBody
from p2pllm.scheduling import Mesh, Network
from p2pllm.swarm import UNMEASURED, Latencies, PeerState, latency_of
from p2pllm.swarm.latency import ELSEWHERE, MAX_REGIONS

A, B, C, D = (digit * 40 for digit in "abcd")


def state(peer: str, region: str, rho: dict[str, float] | None = None, **changes: object) -> PeerState:
    pairs = tuple((other[:16], seconds) for other, seconds in (rho or {}).items())
    return PeerState(peer, peer_body(region=region), metrics_body(rho=pairs, **changes))


def test_measured_pairs_win_in_their_own_direction_first() -> None:
    rho = latency_of([state(A, "eu", {B: 0.01}), state(B, "eu", {A: 0.03, C: 0.02}), state(C, "eu")])
    assert rho(A, B) == 0.01
    assert rho(B, A) == 0.03
    assert rho(C, B) == 0.02
    assert rho(A, A) == 0.0


def test_unmeasured_pairs_take_the_median_of_their_regions() -> None:
    rho = latency_of(
        [state(A, "eu", {C: 0.08, D: 0.1}), state(B, "eu", {C: 0.3}), state(C, "us"), state(D, "us")]
    )
    assert rho(B, D) == pytest.approx(0.1)
    assert rho(D, B) == pytest.approx(0.1)
    assert rho(A, B) == pytest.approx(0.001), "nobody measured inside eu: what is typical for one place"


def test_unknown_peers_have_no_edge() -> None:
    rho = latency_of([state(A, "eu")])
    assert rho(A, B) is None


def by_definition(states: dict[str, PeerState]) -> Network:
    """The network that follows from what peers say, all at once."""
    by_prefix = {peer[:16]: peer for peer in states}
    region_of = {peer: said.body.region for peer, said in states.items()}
    measured = {
        (peer, by_prefix[prefix]): seconds
        for peer, said in states.items()
        if said.metrics is not None
        for prefix, seconds in said.metrics.rho
        if prefix in by_prefix and by_prefix[prefix] != peer
    }
    regional = {}
    for pair in itertools.combinations_with_replacement(sorted(set(region_of.values())), 2):
        values = [s for (a, b), s in measured.items() if tuple(sorted((region_of[a], region_of[b]))) == pair]
        if values:
            regional[pair] = median(values)
    return Network(region_of, measured, regional, 0.001, 0.05)


@pytest.mark.parametrize("seed", range(40))
def test_record_by_record_or_all_at_once_is_the_same(seed: int) -> None:
    """Peers come, measure others that are not there yet, move, go and come back."""
    rng = random.Random(seed)
    mesh = Mesh(UNMEASURED)
    latencies = Latencies(mesh)
    states: dict[str, PeerState] = {}
    for _ in range(40):
        peer = rng.choice([A, B, C, D])
        if rng.random() < 0.2:
            states.pop(peer, None)
            latencies.drop(peer)
        else:
            near = {other: rng.choice([0.01, rng.random()]) for other in (A, B, C, D) if rng.random() < 0.6}
            states[peer] = state(peer, rng.choice(["eu", "us"]), near)
            latencies.put(states[peer])
        assert mesh.network() == by_definition(states) == latency_of(states.values())


def regions_of(mesh: Mesh) -> dict[str, str]:
    return dict(mesh.network().region_of)


def test_late_regions_count_as_one_until_there_is_room() -> None:
    mesh = Mesh(UNMEASURED)
    latencies = Latencies(mesh)
    peers = [f"{number:02x}" * 20 for number in range(MAX_REGIONS + 2)]
    for peer in peers:
        latencies.put(state(peer, f"region of {peer}"))
    *early, late, later, last = peers
    own = {peer: f"region of {peer}" for peer in early}
    assert regions_of(mesh) == own | dict.fromkeys((late, later, last), ELSEWHERE)
    latencies.put(state(late, f"region of {late}", {early[0]: 0.3}))
    rho = mesh.network()
    assert (rho(later, early[0]), rho(later, last)) == (0.3, 0.001)
    latencies.drop(early[1])
    latencies.put(state(later, f"region of {later}"))
    latencies.put(state(last, f"region of {early[2]}"))
    del own[early[1]]
    assert regions_of(mesh) == own | {
        late: ELSEWHERE,
        later: f"region of {later}",
        last: f"region of {early[2]}",
    }


def test_a_prefix_belongs_to_the_first_who_has_it() -> None:
    mesh = Mesh(UNMEASURED)
    latencies = Latencies(mesh)
    twin = A[:16] + 24 * "0"
    states = [state(A, "eu"), state(B, "eu", {A: 0.02}), state(twin, "us", {A: 0.7, B: 0.3})]
    for said in states:
        latencies.put(said)
    rho = mesh.network()
    assert (rho(B, A), rho(twin, B), rho(twin, A)) == (0.02, 0.3, 0.7)
    assert (B, twin) not in rho.measured
    latencies.drop(twin)
    assert mesh.network() == latency_of(states[:2])
    latencies.put(states[2])
    latencies.drop(A)
    assert mesh.network().measured == {(twin, B): 0.3}
    latencies.drop(twin)
    latencies.drop(B)
    assert mesh.network() == UNMEASURED


def test_bodies_here_are_what_the_view_holds() -> None:
    assert isinstance(state(A, "eu").metrics, MetricsBody)
