"""Which peers the router avoids, for how long, that a doubtful chain is better than none, and that the routes
follow the view.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from support.bodies import SWARM, metrics_body, peer_body, record

from p2pllm.errors import NoRouteError
from p2pllm.identity import Identity
from p2pllm.records import Span
from p2pllm.scheduling import Stage
from p2pllm.serving import Router
from p2pllm.serving.entry import router as router_module
from p2pllm.serving.entry.affinity import Kept
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


def publish(view: View, clock: Clock, *identities: Identity, **changes: object) -> None:
    """An entry without layers, and two peers that hold them all."""
    for identity in identities or (ENTRY, FAST, SLOW):
        layer_s = {FAST: 0.001, SLOW: 0.01}.get(identity, 0.0)
        spans = () if identity is ENTRY else (Span(0, LAYERS, "ready"),)
        seq = int(clock.now * 1000)
        metrics = {"spans": spans, "layer_s": layer_s, **changes}
        view.apply(record(identity, peer_body(), seq=seq), clock.now)
        view.apply(record(identity, metrics_body(**metrics), seq=seq), clock.now)


def chosen(router: Router, **more: Any) -> str:
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


def test_who_has_kept_the_text_is_preferred_while_hardly_anybody_is_better(
    router: Router, view: View, clock: Clock
) -> None:
    previewed = partial(chosen, router, preview=True)
    kept = Kept((Stage(SLOW.peer_id, 0, LAYERS),), tokens=100)
    assert previewed(kept=kept) == FAST.peer_id, "ten times as fast: 1.25 + 0.1 x 100 / 10 = 2.25 count"
    clock.now += 1
    publish(view, clock, FAST, head_s=0.0, wait_s=0.0)
    publish(view, clock, SLOW, layer_s=0.0022, head_s=0.0, wait_s=0.0)
    assert previewed(kept=kept) == SLOW.peer_id
    assert previewed(kept=Kept(kept.stages, tokens=90)) == FAST.peer_id, "2.15"
    assert previewed(kept=kept, excluded=frozenset({SLOW.peer_id})) == FAST.peer_id
    clock.now += 1
    publish(view, clock, SLOW, layer_s=0.0022, head_s=0.0, wait_s=0.0, free_kv_blocks=3)
    assert previewed(kept=kept, kv_blocks=3) == SLOW.peer_id
    assert previewed(kept=kept, kv_blocks=4) == FAST.peer_id, "no room"
    clock.now += 1
    publish(view, clock, SLOW, layer_s=0.0022, spans=(Span(0, LAYERS, "draining"),))
    assert previewed(kept=kept) == FAST.peer_id, "it is about to drop its layers"
    clock.now += 4
    publish(view, clock, ENTRY, FAST)
    assert previewed(kept=kept) == FAST.peer_id, "nothing was heard of it"
    assert previewed(kept=Kept((Stage("f" * 40, 0, LAYERS),), tokens=100)) == FAST.peer_id
    halves = Kept((Stage(FAST.peer_id, 0, 5), Stage(SLOW.peer_id, 5, LAYERS)), tokens=100)
    assert previewed(kept=halves) == FAST.peer_id, "together they would not share like that again"


def test_late_records_are_avoided_but_better_than_nothing(router: Router, view: View, clock: Clock) -> None:
    clock.now += 4
    publish(view, clock, ENTRY, SLOW)
    assert chosen(router) == SLOW.peer_id
    assert chosen(router, excluded=frozenset({SLOW.peer_id})) == FAST.peer_id


def test_failures_are_remembered_and_doubled_and_forgiven(router: Router, view: View, clock: Clock) -> None:
    for seconds in (5.5, 11.0, 22.0):
        router.blame([FAST.peer_id])
        router.blame([FAST.peer_id, ENTRY.peer_id])  # other sessions met with the same
        clock.now += seconds - 0.1
        publish(view, clock)
        assert chosen(router) == SLOW.peer_id
        clock.now += 0.2
        publish(view, clock)
        assert chosen(router) == FAST.peer_id
    router.trust([FAST.peer_id])
    router.blame([FAST.peer_id])
    clock.now += 5.6
    publish(view, clock)
    assert chosen(router) == FAST.peer_id
    router.blame([FAST.peer_id, SLOW.peer_id])
    assert chosen(router) == FAST.peer_id, "when everybody failed, the cheapest is tried again"


def test_the_routes_follow_the_view(router: Router, view: View, clock: Clock) -> None:
    assert chosen(router) == FAST.peer_id
    clock.now += 1
    publish(view, clock, FAST, layer_s=0.5)
    assert chosen(router) == SLOW.peer_id, "a record changed"
    clock.now += 1
    publish(view, clock, FAST, spans=(Span(0, 4, "ready"),))
    stages = router.chain(expected_tokens=10).stages
    assert stages == (Stage(FAST.peer_id, 0, 4), Stage(SLOW.peer_id, 4, LAYERS)), "and its layers"
    clock.now += 1
    publish(view, clock, FAST, spans=(Span(0, 4, "ready"), Span(4, LAYERS, "loading")))
    view.apply(record(SLOW, peer_body(leaving=True), seq=int(clock.now * 1000)), clock.now)
    with pytest.raises(NoRouteError, match="no peer serves layers 4:10"):
        chosen(router)
    clock.now += 1
    publish(view, clock)
    assert chosen(router) == FAST.peer_id


def test_who_is_gone_is_no_doubtful_chain(router: Router, view: View, clock: Clock) -> None:
    assert chosen(router) == FAST.peer_id
    clock.now += 5.5
    publish(view, clock, ENTRY)
    assert chosen(router) == FAST.peer_id, "doubtful, but all there is"
    clock.now += 1
    publish(view, clock, ENTRY)
    with pytest.raises(NoRouteError, match="no peer serves layers 0:10"):
        chosen(router)
    clock.now += 1
    publish(view, clock)
    assert chosen(router) == FAST.peer_id


def test_who_says_goodbye_is_gone_at_once(router: Router, view: View, clock: Clock) -> None:
    assert chosen(router) == FAST.peer_id
    seq = int(clock.now * 1000) + 1
    view.apply(record(FAST, peer_body(leaving=True), seq=seq), clock.now)
    view.apply(record(FAST, metrics_body(spans=()), seq=seq), clock.now)
    assert chosen(router) == SLOW.peer_id
    with pytest.raises(NoRouteError):
        chosen(router, excluded=frozenset({SLOW.peer_id}))
    clock.now += 1
    publish(view, clock)
    assert chosen(router) == FAST.peer_id


def test_following_all_along_is_as_good_as_at_the_end(router: Router, view: View, clock: Clock) -> None:
    late = Router(view=view, layers=LAYERS, own=ENTRY.peer_id, clock=clock)
    for layer_s in (0.5, 0.002, 0.1):
        clock.now += 1
        publish(view, clock, FAST, layer_s=layer_s)
        router.follow()
    clock.now += 3
    publish(view, clock, SLOW)
    clock.now += 2.6
    view.expire(clock.now)  # FAST: it is no news any more to who reads the view now
    view.news(0)
    publish(view, clock, ENTRY, SLOW)
    for one in (router, late):
        assert chosen(one, preview=True) == SLOW.peer_id
        assert one.chain(expected_tokens=10, preview=True).latency_s == pytest.approx(0.102, rel=0.01)
        with pytest.raises(NoRouteError):
            chosen(one, excluded=frozenset({SLOW.peer_id}))


def test_measured_latencies_count(router: Router, view: View, clock: Clock) -> None:
    """A chain of two whose hops were measured long loses to a slow peer alone."""
    halves = {FAST: (Span(0, 5, "ready"),), ENTRY: (Span(5, LAYERS, "ready"),)}
    for identity, spans in halves.items():
        publish(view, clock, identity, spans=spans, layer_s=0.001)
    clock.now += 1
    for identity, spans in halves.items():
        publish(view, clock, identity, spans=spans, layer_s=0.001)
    assert [s.peer for s in router.chain(expected_tokens=10).stages] == [FAST.peer_id, ENTRY.peer_id]
    clock.now += 1
    publish(view, clock, FAST, spans=halves[FAST], rho=((ENTRY.peer_id[:16], 0.9),))
    assert chosen(router) == SLOW.peer_id


def test_own_choices_count_until_the_next_record(router: Router, view: View, clock: Clock) -> None:
    """Each chain keeps FAST at work for 12 ms a token; alone, SLOW takes 102 ms."""
    eight_times_fast = [FAST.peer_id] * 8 + [SLOW.peer_id]
    assert [chosen(router, preview=True) for _ in range(9)] == [FAST.peer_id] * 9
    assert [chosen(router) for _ in range(9)] == eight_times_fast
    clock.now += 1
    publish(view, clock, FAST)
    # Now only SLOW counts as busy, with the 102 ms of its one chain.
    assert [chosen(router) for _ in range(16)] == [FAST.peer_id] * 16


def test_a_search_that_takes_long_is_cut_short(
    router: Router, view: View, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two first stages the faster one looks best until its way back is known: a second pass."""
    spans = {FAST: Span(0, 5, "ready"), SLOW: Span(0, 5, "ready"), ENTRY: Span(5, LAYERS, "ready")}
    ways = {
        FAST: ((ENTRY.peer_id[:16], 0.01), (SLOW.peer_id[:16], 0.5)),
        SLOW: ((ENTRY.peer_id[:16], 0.01), (FAST.peer_id[:16], 0.5)),
        ENTRY: ((FAST.peer_id[:16], 0.5), (SLOW.peer_id[:16], 0.01)),
    }
    clock.now += 1
    for identity, span in spans.items():
        publish(view, clock, identity, spans=(span,), rho=ways[identity])
    thorough = router.chain(expected_tokens=1000, preview=True)
    assert (thorough.stages[0].peer, thorough.gap_s) == (SLOW.peer_id, 0.0)
    monkeypatch.setattr(router_module, "EFFORT", 1)
    hurried = router.chain(expected_tokens=1000, preview=True)
    assert hurried.gap_s > 0
    assert hurried.latency_s - hurried.gap_s <= thorough.latency_s <= hurried.latency_s


def test_stages_that_are_kept_and_hops_that_are_severed(router: Router, view: View, clock: Clock) -> None:
    kept = Stage(SLOW.peer_id, 3, 6)
    stages = router.chain(expected_tokens=10, fixed=[kept]).stages
    assert stages == (Stage(FAST.peer_id, 0, 3), kept, Stage(FAST.peer_id, 6, LAYERS))
    severed = frozenset({(SLOW.peer_id, FAST.peer_id)})
    stages = router.chain(expected_tokens=10, fixed=[kept], severed=severed).stages
    assert stages[-1] == Stage(SLOW.peer_id, 6, LAYERS)
