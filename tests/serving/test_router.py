"""Which peers the router avoids, for how long, and that a doubtful chain is better than none."""

from __future__ import annotations

import pytest
from support.bodies import SWARM, metrics_body, peer_body, record

from p2pllm.errors import NoRouteError
from p2pllm.identity import Identity
from p2pllm.records import Span
from p2pllm.serving import Router
from p2pllm.swarm import View

LAYERS = 10
ENTRY, FAST, SLOW = (Identity.from_seed(bytes([number]) * 32) for number in range(3))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def view(clock: Clock) -> View:
    made = View(SWARM)
    publish(made, clock)
    return made


def publish(view: View, clock: Clock, *identities: Identity) -> None:
    """An entry without layers, and two peers that hold them all."""
    for identity in identities or (ENTRY, FAST, SLOW):
        layer_s = {FAST: 0.001, SLOW: 0.01}.get(identity, 0.0)
        spans = () if identity is ENTRY else (Span(0, LAYERS, "ready"),)
        seq = int(clock.now * 1000)
        view.apply(record(identity, peer_body(), seq=seq), clock.now)
        view.apply(record(identity, metrics_body(spans=spans, layer_s=layer_s), seq=seq), clock.now)


def chosen(router: Router, **more: frozenset[str]) -> str:
    (stage,) = router.chain(expected_tokens=10, **more).stages
    return stage.peer


@pytest.fixture
def router(view: View, clock: Clock) -> Router:
    return Router(view=view, layers=LAYERS, own=ENTRY.peer_id, clock=clock)


def test_the_cheapest_peer_unless_it_is_excluded(router: Router) -> None:
    assert chosen(router) == FAST.peer_id
    assert chosen(router, excluded=frozenset({FAST.peer_id})) == SLOW.peer_id
    with pytest.raises(NoRouteError):
        chosen(router, excluded=frozenset({FAST.peer_id, SLOW.peer_id}))


def test_late_records_are_avoided_but_better_than_nothing(router: Router, view: View, clock: Clock) -> None:
    clock.now += 4
    publish(view, clock, ENTRY, SLOW)
    assert chosen(router) == SLOW.peer_id
    assert chosen(router, excluded=frozenset({SLOW.peer_id})) == FAST.peer_id


def test_failures_are_remembered_and_doubled_and_forgiven(router: Router, view: View, clock: Clock) -> None:
    for seconds in (2, 4, 8):
        router.blame([FAST.peer_id])
        clock.now += seconds - 0.1
        publish(view, clock)
        assert chosen(router) == SLOW.peer_id
        clock.now += 0.2
        publish(view, clock)
        assert chosen(router) == FAST.peer_id
    router.trust([FAST.peer_id])
    router.blame([FAST.peer_id])
    clock.now += 2.1
    publish(view, clock)
    assert chosen(router) == FAST.peer_id
    router.blame([FAST.peer_id, SLOW.peer_id])
    assert chosen(router) == FAST.peer_id, "when everybody failed, the cheapest is tried again"
