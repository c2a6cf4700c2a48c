"""Whom a peer measures, and how often it tries those who do not answer."""

from __future__ import annotations

from collections import Counter

import pytest
from support.bodies import metrics_body, peer_body

from p2pllm.errors import LinkError
from p2pllm.records import Span
from p2pllm.swarm import PeerState, Prober
from p2pllm.swarm.prober import MAX_LINKS, MAX_PROBED, OTHERS, ROTATION_S, LatencyEstimates, targets

A, B = "a" * 40, "b" * 40
LAYERS = 30


def holds(peer: str, start: int, end: int, **changes: object) -> PeerState:
    return PeerState(peer, peer_body(**changes), metrics_body(spans=(Span(start, end, "ready"),)))


def name(number: int) -> str:
    return f"{number:040x}"


def chosen(own: str, peers: list[PeerState], linked: set[str] | None = None, now: float = 0.0) -> list[str]:
    return [state.peer for state in targets(own, peers, layers=LAYERS, linked=linked or set(), now=now)]


def test_an_estimate_follows_the_wire_and_not_one_busy_moment() -> None:
    estimates = LatencyEstimates()
    for _ in range(5):
        estimates.add(A, 0.02)
    assert dict(estimates.published())[A[:16]] == pytest.approx(0.01)
    estimates.add(A, 2.0)  # waited behind a busy loop: counts as 0.02 one way at most
    assert dict(estimates.published())[A[:16]] == pytest.approx(0.01 + 0.3 * 0.01)
    for _ in range(60):
        estimates.add(A, 0.1)
    assert dict(estimates.published())[A[:16]] == pytest.approx(0.05)
    estimates.keep([B])
    assert estimates.published() == ()


def test_holders_of_the_next_layer_come_first_and_the_ring_closes() -> None:
    peers = [holds(A, 0, 10), holds(B, 20, 30), *(holds(name(number), 5, 15) for number in range(4))]
    assert set(chosen(A, peers)[:4]) == {name(number) for number in range(4)}
    assert chosen(B, peers)[0] == A
    assert chosen("f" * 40, peers)[0] == A, "who holds nothing is followed by the first stage"
    assert A not in chosen(A, peers)


def test_peers_that_take_no_sessions_are_no_successors() -> None:
    peers = [holds(A, 0, 10), holds(B, 10, 20), holds(name(1), 10, 20, leaving=True)]
    assert chosen(A, peers)[0] == B


def test_not_everybody_measures_the_same_peers() -> None:
    peers = [holds(name(number), 0, LAYERS) for number in range(64)]
    counts = Counter(peer for own in peers for peer in chosen(own.peer, peers))
    assert len(counts) == 64
    assert max(counts.values()) <= 3 * MAX_PROBED
    assert all(len(chosen(own.peer, peers)) <= MAX_PROBED for own in peers)


def test_a_few_strangers_at_a_time_as_long_as_there_are_few_links() -> None:
    peers = [holds(A, 0, 10), *(holds(name(number), 0, 10) for number in range(40))]
    first = chosen(A, peers)
    assert len(first) == OTHERS
    assert chosen(A, peers, now=ROTATION_S - 1) == first
    assert chosen(A, peers, now=ROTATION_S) != first
    linked = {name(number) for number in range(MAX_LINKS)}
    assert set(chosen(A, peers, linked)) <= linked
    assert len(chosen(A, peers, linked)) == MAX_PROBED


class FakeLinks:
    def __init__(self) -> None:
        self.tried: list[str] = []

    def peers(self) -> set[str]:
        return set()

    async def ensure(self, peer: str, addresses: object, certificate: bytes) -> None:
        self.tried.append(peer)
        if peer == B:
            raise LinkError("nobody there")

    async def ping(self, peer: str) -> float:
        return 0.02


async def test_who_does_not_answer_is_tried_less_and_less() -> None:
    now, links = 0.0, FakeLinks()
    prober = Prober(links, lambda: now)  # type: ignore[arg-type]
    peers = [holds("c" * 40, 0, 10), holds(A, 10, 20), holds(B, 10, 20)]
    for now in range(16):  # noqa: B007  the prober's clock reads it
        await prober.probe("c" * 40, peers, LAYERS)
    assert links.tried.count(A) == 16
    assert links.tried.count(B) == 4, "at 0, 2, 6 and 14 s"
    assert prober.estimates.published() == ((A[:16], 0.01),)
