"""The view: newest wins, liveness by local receipt, silence, hints and goodbyes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bodies import SWARM, metrics_body, peer_body, record

from p2pllm.dht import Digest
from p2pllm.identity import Identity
from p2pllm.records import ClaimBody, Record, Span, SwarmBody, SwarmKey, open_record, seal
from p2pllm.scheduling import Holder
from p2pllm.swarm import View
from p2pllm.swarm import view as view_module

ONE, TWO = Identity.from_seed(bytes(32)), Identity.from_seed(bytes([1]) * 32)


def heard(view: View, identity: Identity, *, at: float, seq: int = 1) -> None:
    view.apply(record(identity, peer_body(), seq=seq), at)
    view.apply(record(identity, metrics_body(), seq=seq), at)


def here(view: View, now: float) -> set[str]:
    return {state.peer for state in view.peers(now)}


def digest(identity: Identity, seq: int, life: float = 5.5) -> Digest:
    return Digest(identity.peer_id, "metrics", seq, life)


def test_a_peer_is_known_by_its_newest_records() -> None:
    view = View(SWARM)
    heard(view, ONE, at=0.0, seq=5)
    assert not view.apply(record(ONE, metrics_body(layer_s=9.0), seq=5), 1.0)
    assert not view.apply(record(ONE, metrics_body(layer_s=9.0), seq=4), 1.0)
    assert view.apply(record(ONE, metrics_body(layer_s=0.5), seq=6), 1.0)
    (state,) = view.peers(2.0)
    assert state.metrics is not None
    assert (state.peer, state.metrics.layer_s, state.heard_s) == (ONE.peer_id, 0.5, 1.0)
    assert view.seq(ONE.peer_id) == 6
    assert view.is_newer(ONE.peer_id, "peer", 6)
    assert not view.is_newer(ONE.peer_id, "metrics", 6)


def test_records_of_other_swarms_and_kinds_are_not_news() -> None:
    view = View(SWARM)
    assert not view.apply(record(ONE, peer_body(), swarm=bytes(20)), 0.0)
    assert not view.apply(record(ONE, SwarmBody("m", "f", 3)), 0.0)
    assert not view.apply(record(ONE, ClaimBody(1, 0)), 0.0)
    assert view.peers(0.0) == ()


def test_a_private_swarm_takes_only_what_is_sealed_with_its_key() -> None:
    def sealed(secret: SwarmKey | None) -> Record:
        return open_record(seal(ONE, peer_body(), swarm=SWARM, seq=1, ttl=30.0, secret=secret))

    own, other = SwarmKey(b"k" * 16), SwarmKey(b"o" * 16)
    view = View(SWARM, own)
    assert not view.apply(sealed(None), 0.0)
    assert not view.apply(sealed(other), 0.0)
    assert not View(SWARM).apply(sealed(own), 0.0)
    assert view.apply(sealed(own), 0.0)
    assert here(view, 0.0) == {ONE.peer_id}


def test_a_silent_peer_is_out_in_time_and_old_copies_do_not_revive_it() -> None:
    view = View(SWARM)
    heard(view, ONE, at=0.0, seq=3)
    assert view.changes(0.0) == ({ONE.peer_id}, frozenset())
    assert view.peer(ONE.peer_id, 5.5) is not None
    assert view.peer(ONE.peer_id, 5.6) is None
    assert view.changes(5.6) == (frozenset(), {ONE.peer_id})
    heard(view, ONE, at=7.0, seq=3)
    view.apply(record(ONE, peer_body(), seq=4), 7.0)  # a late copy of a description
    assert view.peers(7.0) == ()
    view.apply(record(ONE, metrics_body(), seq=4), 8.0)
    assert view.changes(8.0) == ({ONE.peer_id}, frozenset())


def test_a_copy_that_was_kept_for_long_counts_for_what_it_has_left() -> None:
    view = View(SWARM)
    view.apply(record(ONE, peer_body()), 0.0)
    assert view.apply(record(ONE, metrics_body(), seq=1), 0.0, life=2.0)
    assert here(view, 2.0) == {ONE.peer_id}
    assert here(view, 2.1) == set()
    assert not view.apply(record(ONE, metrics_body(), seq=2), 3.0, life=0.0)
    assert view.apply(record(ONE, metrics_body(), seq=2, ttl=600.0), 3.0, life=1e9)
    assert here(view, 8.5) == {ONE.peer_id}
    assert here(view, 8.6) == set(), "and nobody can make a record count longer than it should"


def test_a_life_that_is_cut_short_takes_nothing_away() -> None:
    view = View(SWARM)
    heard(view, ONE, at=0.0)
    view.apply(record(ONE, metrics_body(), seq=2), 1.0, life=0.1)
    assert here(view, 5.5) == {ONE.peer_id}


def test_hints_keep_a_peer_but_not_for_ever() -> None:
    view = View(SWARM)
    heard(view, ONE, at=0.0, seq=10)
    assert not view.hint(digest(ONE, seq=10), 3.0)  # nothing new
    assert here(view, 5.6) == set()
    assert not view.hint(digest(ONE, seq=11, life=4.0), 3.0)
    assert here(view, 7.0) == {ONE.peer_id}
    assert here(view, 7.1) == set()
    for now in range(4, 15):
        view.hint(digest(ONE, seq=100 + now), now)
    assert here(view, 15.5) == {ONE.peer_id}, "10 s beyond what the record itself is good for"
    assert here(view, 15.6) == set()


def test_a_lie_about_a_sequence_number_does_not_keep_honest_hints_out() -> None:
    view = View(SWARM)
    heard(view, ONE, at=0.0, seq=10)
    view.hint(digest(ONE, seq=2**60), 1.0)
    view.hint(digest(ONE, seq=12), 4.0)
    assert here(view, 9.5) == {ONE.peer_id}


def test_hints_that_only_a_record_can_confirm() -> None:
    view = View(SWARM)
    assert view.hint(digest(ONE, seq=1), 0.0), "a stranger"
    heard(view, ONE, at=0.0)
    assert not view.hint(Digest(ONE.peer_id, "peer", 9, 30.0), 1.0)
    assert view.hint(digest(ONE, seq=2), 6.0), "one who was gone"
    assert here(view, 6.0) == set()
    view.apply(record(TWO, metrics_body()), 6.0)
    assert view.hint(Digest(TWO.peer_id, "peer", 1, 30.0), 6.0), "one who has not been described"


def test_a_starting_peer_is_listed_but_is_no_vertex() -> None:
    view = View(SWARM)
    view.apply(record(ONE, peer_body()), 0.0)
    view.apply(record(TWO, peer_body()), 0.0)
    spans = (Span(0, 4, "loading"), Span(4, 9, "ready"))
    view.apply(record(TWO, metrics_body(spans=spans, layer_s=0.25, head_s=0.5)), 0.0)
    first, second = sorted(view.peers(1.0), key=lambda state: state.peer != ONE.peer_id)
    assert (first.metrics, first.ready, list(first.holders())) == (None, False, [])
    assert list(second.holders()) == [Holder(TWO.peer_id, 4, 9, 0.25, 0.5, 0.0, 100, heard_s=0.0)]
    assert view.peer(ONE.peer_id, 30.5) is None


def test_a_peer_that_is_leaving_takes_no_new_sessions() -> None:
    view = View(SWARM)
    heard(view, ONE, at=0.0)
    view.apply(record(ONE, peer_body(paused=True), seq=2), 0.5)
    assert view.peers(1.0)[0].ready, "a paused one goes on until others have its layers"
    view.apply(record(ONE, peer_body(leaving=True), seq=3), 0.5)
    (state,) = view.peers(1.0)
    assert not state.ready
    assert list(state.holders()) == []


@pytest.mark.parametrize("description_first", [True, False])
def test_who_says_goodbye_is_out_at_once_and_may_come_back(description_first: bool) -> None:
    view = View(SWARM)
    heard(view, ONE, at=0.0)
    heard(view, TWO, at=0.0)
    version, _ = view.news(0)
    goodbye = [record(ONE, peer_body(leaving=True), seq=2), record(ONE, metrics_body(spans=()), seq=3)]
    for said in goodbye if description_first else reversed(goodbye):
        assert here(view, 1.0) == {ONE.peer_id, TWO.peer_id}
        view.apply(said, 1.0)
    assert here(view, 1.0) == {TWO.peer_id}
    assert view.news(version)[1] == [ONE.peer_id]
    assert view.hint(digest(ONE, seq=4), 1.5)
    assert here(view, 1.5) == {TWO.peer_id}
    view.apply(record(ONE, peer_body(), seq=5), 2.0)
    view.apply(record(ONE, metrics_body(), seq=6), 2.0)
    assert here(view, 2.0) == {ONE.peer_id, TWO.peer_id}


def test_long_silent_peers_are_forgotten() -> None:
    view = View(SWARM)
    heard(view, ONE, at=0.0, seq=7)
    view.changes(599.0)
    assert view.seq(ONE.peer_id) == 7
    view.changes(601.0)
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
    view.expire(6.6)
    silent, peers = view.news(later)
    assert peers == [TWO.peer_id], "silence is news, once somebody looks"
    view.hint(digest(ONE, seq=3), 7.0)
    assert view.news(silent)[1] == [ONE.peer_id], "and so is a sign of life"


def test_holders_say_when_they_were_heard() -> None:
    view = View(SWARM)
    heard(view, ONE, at=5.0)
    view.apply(record(ONE, peer_body(region="us"), seq=2), 6.0)
    (state,) = view.peers(7.0)
    (holder,) = state.holders()
    assert (state.heard_s, holder.heard_s) == (5.0, 5.0)


def test_newcomers_push_out_who_has_been_silent_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_module, "MAX_PEERS", 4)
    view = View(SWARM)
    heard(view, ONE, at=0.0, seq=1)
    for number in range(2, 12):
        view.apply(record(Identity.from_seed(bytes([number]) * 32), peer_body()), number / 10)
        heard(view, ONE, at=number / 10, seq=number)
    assert len(view.peers(1.2)) == len(view) == 4
    assert view.peer(ONE.peer_id, 1.2) is not None, "who goes on speaking stays"


IDENTITIES = [Identity.from_seed(bytes([number]) * 32) for number in range(3)]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["peer", "metrics", "leaving", "empty", "hint", "expire"]),
        st.integers(0, 2),
        st.integers(1, 12),
        st.floats(0.1, 3.0),
        st.floats(0.0, 8.0),
    ),
    max_size=25,
)


@given(STEPS)
@settings(max_examples=60, deadline=None)
def test_readers_that_follow_the_news_know_what_the_view_knows(steps: list[tuple]) -> None:
    """Whatever comes, in whatever order: states by news equal states by asking, and silence ends in 5.5 s."""
    view, now, version = View(SWARM), 0.0, 0
    followed: dict[str, object] = {}
    spoke: dict[str, float] = {}
    for what, who, seq, pause, life in steps:
        now += pause
        identity = IDENTITIES[who]
        if what == "hint":
            view.hint(digest(identity, seq, life), now)
        elif what != "expire":
            body = {
                "peer": peer_body(),
                "leaving": peer_body(leaving=True),
                "metrics": metrics_body(),
                "empty": metrics_body(spans=()),
            }[what]
            if view.apply(record(identity, body, seq=seq), now, life=life):
                spoke[identity.peer_id] = now
        view.expire(now)
        version, news = view.news(version)
        for peer in news:
            state = view.peer(peer, now)
            followed[peer] = None if state is None else (state.body, state.metrics, state.heard_s)
        known = {state.peer: (state.body, state.metrics, state.heard_s) for state in view.peers(now)}
        assert {peer: said for peer, said in followed.items() if said is not None} == known
        assert len(view) == len(known)
        assert all(now - spoke[peer] <= 30.0 for peer in known)
