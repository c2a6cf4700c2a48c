"""The storage against a model of it, and each of its rules by hand."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule
from support.bodies import METRICS, PEER, SWARM

from p2pllm.dht.storage import REMEMBER_S, Records
from p2pllm.errors import RecordError
from p2pllm.identity import Identity
from p2pllm.records import Body, directory_key, seal

KEY = directory_key(SWARM, bytes(20), 0)
OWNERS = [Identity.from_seed(bytes([n] * 32)) for n in range(3)]


def sealed(owner: int = 0, body: Body = METRICS, seq: int = 1, ttl: float = 5.0) -> bytes:
    return seal(OWNERS[owner], body, swarm=SWARM, seq=seq, ttl=ttl)


class StorageMachine(RuleBasedStateMachine):
    """Whatever comes in whatever order, the newest of each (owner, kind) is held, as long as it may live."""

    sent = Bundle("sent")

    def __init__(self) -> None:
        super().__init__()
        self.records = Records()
        self.now = 100.0
        # slot → (seq, expires, first seen, ttl) of the newest ever held
        self.newest: dict[tuple[int, str], tuple[int, float, float, float]] = {}

    @rule(
        target=sent,
        owner=st.integers(0, 2),
        body=st.sampled_from([METRICS, PEER]),
        seq=st.integers(0, 6),
        ttl=st.sampled_from([1.0, 5.0, 30.0]),
    )
    def make(self, owner: int, body: Body, seq: int, ttl: float) -> tuple[int, str, int, float, bytes]:
        return owner, body.kind, seq, ttl, sealed(owner, body, seq, ttl)

    @rule(record=sent, life=st.sampled_from([-1.0, 0.0, 0.5, 3.0, 1000.0]))
    def store(self, record: tuple[int, str, int, float, bytes], life: float) -> None:
        owner, kind, seq, ttl, raw = record
        accepted = self.records.accept(KEY, raw, life, source="host", now=self.now)
        newest, expires, first, newest_ttl = self.newest.get((owner, kind), (-1, 0.0, 0.0, 0.0))
        allowed = self.now + min(life, ttl)
        if seq > newest and life > 0:
            assert accepted
            self.newest[owner, kind] = seq, allowed, self.now, ttl
        elif seq == newest and ttl == newest_ttl and self.now < expires:  # the same record again
            assert accepted
            self.newest[owner, kind] = seq, max(expires, min(allowed, first + ttl)), first, ttl
        else:
            assert not accepted

    @rule(seconds=st.sampled_from([0.25, 1.0, 4.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def what_is_live_is_the_newest(self) -> None:
        live = {
            (record.public_key, record.kind): record.seq for record, _ in self.records.live(KEY, self.now)
        }
        expected = {
            (OWNERS[owner].public_key, kind): seq
            for (owner, kind), (seq, expires, _, _) in self.newest.items()
            if expires > self.now
        }
        assert live == expected

    @invariant()
    def pages_together_are_what_is_live(self) -> None:
        paged, cursor, more = [], 0, True
        while more:
            page = self.records.page(KEY, cursor, 900, self.now)
            assert page.items or not page.more
            assert sum(len(record.raw) for record, _ in page.items) <= 900
            assert all(0 < life <= record.ttl for record, life in page.items)
            paged += [record for record, _ in page.items]
            more, cursor = page.more, page.cursor
        assert sorted(record.raw for record in paged) == sorted(
            held.record.raw for held in self.records.live(KEY, self.now)
        )


TestStorage = StorageMachine.TestCase
TestStorage.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_an_empty_storage_is_true_or_the_package_would_replace_it() -> None:
    assert len(Records()) == 0
    assert bool(Records()) is True


def test_a_record_under_a_key_that_is_not_its_own_is_refused() -> None:
    with pytest.raises(RecordError, match="key that it does not belong under"):
        Records().accept(bytes(20), sealed(), 5.0, source="host", now=0.0)


def test_a_forged_record_is_refused_and_changes_nothing() -> None:
    records = Records()
    assert records.accept(KEY, sealed(seq=1), 5.0, source="host", now=0.0)
    with pytest.raises(RecordError, match="signature"):
        records.accept(KEY, sealed(seq=2)[:-1] + b"\0", 5.0, source="host", now=0.0)
    assert [held.record.seq for held in records.live(KEY, 0.0)] == [1]


def test_of_two_records_with_one_number_the_first_stays() -> None:
    records = Records()
    assert records.accept(KEY, sealed(ttl=5.0), 5.0, source="host", now=0.0)
    assert not records.accept(KEY, sealed(ttl=6.0), 5.0, source="host", now=0.0)
    assert [held.record.ttl for held in records.live(KEY, 0.0)] == [5.0]


def test_life_only_shrinks_on_the_way_from_node_to_node() -> None:
    """Handed round a circle of nodes for ever, a record still dies when its owner falls silent."""
    circle = [Records() for _ in range(3)]
    circle[0].accept(KEY, sealed(ttl=5.0), 5.0, source="owner", now=0.0)
    now, hops = 0.0, 0
    while page := circle[hops % 3].page(KEY, 0, 1000, now).items:
        (record, life), *_ = page
        now, hops = now + 0.4, hops + 1
        circle[hops % 3].accept(KEY, record.raw, life - 0.4, source="other", now=now)
    assert 4.5 < now < 5.5


def test_a_copy_with_a_cut_life_does_not_outdo_the_owner() -> None:
    records = Records()
    assert records.accept(KEY, sealed(ttl=5.0), 0.1, source="spoiler", now=0.0)
    assert records.accept(KEY, sealed(ttl=5.0), 5.0, source="owner", now=0.05)
    assert records.live(KEY, 4.9)
    assert not records.live(KEY, 5.01)


def test_what_expired_is_not_taken_again_until_it_is_forgotten() -> None:
    records = Records()
    assert records.accept(KEY, sealed(seq=3), 5.0, source="host", now=0.0)
    assert not records.accept(KEY, sealed(seq=3), 5.0, source="host", now=10.0)
    assert not records.accept(KEY, sealed(seq=2), 5.0, source="host", now=12.0)
    assert not records.accept(KEY, sealed(seq=3), 5.0, source="host", now=9.0 + REMEMBER_S)
    assert records.accept(KEY, sealed(seq=2), 5.0, source="host", now=11.0 + REMEMBER_S)


def test_what_expired_does_not_keep_newer_ones_out() -> None:
    records = Records()
    assert records.accept(KEY, sealed(seq=3), 5.0, source="host", now=0.0)
    assert records.accept(KEY, sealed(seq=4), 5.0, source="host", now=10.0)
    assert [held.record.seq for held in records.live(KEY, 10.0)] == [4]


def test_a_source_cannot_use_up_the_room_of_others() -> None:
    records = Records(max_per_source=2)
    assert [records.accept(KEY, sealed(owner), 5.0, source="greedy", now=0.0) for owner in range(3)] == [
        True,
        True,
        False,
    ]
    assert records.accept(KEY, sealed(2), 5.0, source="modest", now=0.0)
    assert records.accept(KEY, sealed(0, seq=2), 5.0, source="greedy", now=0.0), "an update takes no room"
    # What expires gives its room back.
    assert records.accept(KEY, sealed(1, seq=2), 5.0, source="greedy", now=10.0)
    assert records.accept(KEY, sealed(2, seq=2), 5.0, source="greedy", now=10.0)


CROWD = [Identity.from_seed(number.to_bytes(32)) for number in range(1, 40)]


def offer(records: Records, owner: int, source: str, body: Body = METRICS, now: float = 0.0) -> bool:
    raw = seal(CROWD[owner], body, swarm=SWARM, seq=1, ttl=5.0)
    return records.accept(KEY, raw, 5.0, source=source, now=now)


def held_from(records: Records, owners: range) -> set[int]:
    """Which of these owners have a record there."""
    keys = {record.public_key for record, _ in records.live(KEY, 0.0)}
    return {owner for owner in owners if CROWD[owner].public_key in keys}


def test_a_key_has_a_bound() -> None:
    records = Records(max_per_key=8)
    assert [offer(records, n, str(n)) for n in range(9)] == [True] * 8 + [False]
    assert len(records) == 8


@pytest.mark.parametrize("bound", ["max_per_key", "max_records"])
def test_a_crowd_cannot_shut_others_out(bound: str) -> None:
    """Two sources have used up all the room. Who comes takes the oldest of what the greedier one has."""
    records = Records(**{bound: 12})
    assert all(offer(records, n, "one") for n in range(7))
    assert all(offer(records, n, "other") for n in range(7, 12))
    assert offer(records, 12, "modest")
    assert held_from(records, range(13)) == {*range(1, 13)}
    assert offer(records, 13, "modest")
    assert held_from(records, range(14)) == {*range(2, 14)}
    assert len(records) == 12
    assert not offer(records, 14, "one"), "who has most gets no more"
    assert not offer(records, 0, "modest"), "what had to go is remembered like what expired"
    forged = seal(CROWD[20], METRICS, swarm=SWARM, seq=1, ttl=5.0)[:-1] + b"\0"
    with pytest.raises(RecordError, match="signature"):
        records.accept(KEY, forged, 5.0, source="forger", now=0.0)
    assert len(records) == 12, "and nothing goes for what is not valid"


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 38)), max_size=120))
def test_whoever_wants_little_gets_it_whatever_others_want(offers: list[tuple[str, int]]) -> None:
    """Of five sources each has a fifth of the room for sure."""
    records = Records(max_records=10)
    mine = Identity.from_seed(bytes([99] * 32))
    for raw in (seal(mine, body, swarm=SWARM, seq=1, ttl=5.0) for body in (METRICS, PEER)):
        assert records.accept(KEY, raw, 5.0, source="me", now=0.0)
    for source, owner in offers:
        offer(records, owner, source)
        assert len(records) <= 10
    kinds = {record.kind for record, _ in records.live(KEY, 0.0) if record.public_key == mine.public_key}
    assert kinds == {"metrics", "peer"}


def test_a_later_page_holds_only_what_is_new() -> None:
    records = Records()
    for owner in range(3):
        records.accept(KEY, sealed(owner), 5.0, source="host", now=0.0)
    seen = records.page(KEY, 0, 10_000, 0.0)
    assert len(seen.items) == 3
    assert records.page(KEY, seen.cursor, 10_000, 0.0).items == []
    records.accept(KEY, sealed(1, seq=2), 5.0, source="host", now=1.0)
    (later,) = records.page(KEY, seen.cursor, 10_000, 1.0).items
    assert (later.record.public_key, later.record.seq) == (OWNERS[1].public_key, 2)
