"""The view: newest wins, liveness by local receipt, silence and goodbyes."""

from __future__ import annotations

from support.bodies import SWARM, metrics_body, peer_body, record

from p2pllm.identity import Identity
from p2pllm.records import Span, SwarmBody
from p2pllm.scheduling import Holder
from p2pllm.swarm import View

ONE, TWO = Identity.generate(), Identity.generate()


def heard(view: View, identity: Identity, *, at: float, seq: int = 1) -> None:
    view.apply(record(identity, peer_body(), seq=seq), at)
    view.apply(record(identity, metrics_body(), seq=seq), at)


def test_a_peer_is_known_by_its_newest_records() -> None:
    view = View(SWARM)
    heard(view, ONE, at=0.0, seq=5)
    assert not view.apply(record(ONE, metrics_body(layer_s=9.0), seq=5), 1.0)
    assert not view.apply(record(ONE, metrics_body(layer_s=9.0), seq=4), 1.0)
    assert view.apply(record(ONE, metrics_body(layer_s=0.5), seq=6), 1.0)
    (state,) = view.peers(2.0)
    assert state.metrics is not None
    assert (state.peer, state.metrics.layer_s, state.age_s) == (ONE.peer_id, 0.5, 1.0)
    assert view.seq(ONE.peer_id) == 6


def test_records_of_other_swarms_and_kinds_are_not_news() -> None:
    view = View(SWARM)
    assert not view.apply(record(ONE, peer_body(), swarm=bytes(20)), 0.0)
    assert not view.apply(record(ONE, SwarmBody("m", "f", 3)), 0.0)
    assert view.peers(0.0) == ()


def test_a_silent_peer_is_out_after_six_seconds_and_old_copies_do_not_revive_it() -> None:
    view = View(SWARM)
    heard(view, ONE, at=0.0, seq=3)
    assert view.changes(0.0) == ({ONE.peer_id}, frozenset())
    assert view.peer(ONE.peer_id, 6.0) is not None
    assert view.peer(ONE.peer_id, 6.1) is None
    assert view.changes(6.1) == (frozenset(), {ONE.peer_id})
    heard(view, ONE, at=7.0, seq=3)
    view.apply(record(ONE, peer_body(), seq=4), 7.0)  # a late copy of a description
    assert view.peers(7.0) == ()
    view.apply(record(ONE, metrics_body(), seq=4), 8.0)
    assert view.changes(8.0) == ({ONE.peer_id}, frozenset())


def test_a_starting_peer_is_listed_but_is_no_vertex() -> None:
    view = View(SWARM)
    view.apply(record(ONE, peer_body()), 0.0)
    view.apply(record(TWO, peer_body()), 0.0)
    view.apply(record(TWO, metrics_body(spans=(Span(0, 4, "loading"), Span(4, 9, "ready")))), 0.0)
    first, second = sorted(view.peers(1.0), key=lambda state: state.peer != ONE.peer_id)
    assert (first.metrics, first.ready, list(first.holders())) == (None, False, [])
    assert list(second.holders()) == [Holder(TWO.peer_id, 4, 9, 0.001, 0.002, 0.0, 100, heard_s=0.0)]
    assert view.peer(ONE.peer_id, 30.5) is None


def test_a_leaving_peer_takes_no_new_sessions() -> None:
    view = View(SWARM)
    heard(view, ONE, at=0.0)
    view.apply(record(ONE, peer_body(leaving=True), seq=2), 0.5)
    (state,) = view.peers(1.0)
    assert not state.ready
    assert list(state.holders()) == []


def test_long_silent_peers_are_forgotten() -> None:
    view = View(SWARM)
    heard(view, ONE, at=0.0, seq=7)
    view.changes(700.0)
    assert view.seq(ONE.peer_id) == 0


def test_news_are_told_once_to_each_reader() -> None:
    view = View(SWARM)
    assert view.news(0) == (0, [])
    heard(view, ONE, at=0.0)
    heard(view, TWO, at=1.0)
    version, peers = view.news(0)
    assert peers == [TWO.peer_id, ONE.peer_id]
    assert view.news(version) == (version, [])
    view.apply(record(ONE, metrics_body(), seq=1), 2.0)  # known already
    assert view.news(version) == (version, [])
    view.apply(record(ONE, metrics_body(), seq=2), 2.0)
    later, peers = view.news(version)
    assert (later > version, peers) == (True, [ONE.peer_id])
    assert view.news(0)[1] == [ONE.peer_id, TWO.peer_id], "another reader has heard nothing yet"
    view.changes(700.0)
    assert view.news(0) == (later, []), "who is forgotten is no news"


def test_holders_say_when_they_were_heard() -> None:
    view = View(SWARM)
    heard(view, ONE, at=5.0)
    view.apply(record(ONE, peer_body(region="us"), seq=2), 6.0)
    (state,) = view.peers(7.0)
    (holder,) = state.holders()
    assert (state.age_s, state.heard_s, holder.heard_s) == (2.0, 5.0, 5.0)
