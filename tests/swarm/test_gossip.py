"""The flood: how far a record gets and how often it is sent, what it refuses, and whom it is passed to."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from support.bodies import SWARM, metrics_body, peer_body, record

from p2pllm.errors import LinkError
from p2pllm.identity import Identity
from p2pllm.records import Record, SwarmBody, open_record
from p2pllm.swarm import View
from p2pllm.swarm.flood import BURST, MAX_PENDING, MAX_SEEN, Flood
from p2pllm.swarm.gossip import CHOSEN, Gossiper
from p2pllm.transport import MAX_GOSSIP_RECORDS, Gossip

A, B, C = "a" * 40, "b" * 40, "c" * 40
OWN, ONE = Identity.from_seed(bytes(32)), Identity.from_seed(bytes([1]) * 32)


def raw(number: int) -> bytes:
    """As good as a record to the pure part: it ends in 64 bytes that nothing else ends in."""
    return number.to_bytes(64)


def test_a_record_goes_once_to_everybody_who_has_not_got_it() -> None:
    flood = Flood()
    assert flood.hear(A, raw(1), 0.0)
    assert flood.hear(B, raw(1), 0.0), "nobody has checked it yet"
    flood.spread(raw(1), A)
    assert not flood.hear(B, raw(1), 0.0)
    assert flood.batches([A, B, C]) == {C: (raw(1),)}
    assert flood.idle
    assert flood.batches([A, B, C]) == {}
    assert not flood.hear(C, raw(1), 99.0)


def test_what_does_not_fit_one_message_goes_with_the_next() -> None:
    flood = Flood()
    for number in range(MAX_GOSSIP_RECORDS + 1):
        flood.spread(raw(number))
    assert len(flood.batches([A])[A]) == MAX_GOSSIP_RECORDS
    assert flood.batches([A]) == {A: (raw(MAX_GOSSIP_RECORDS),)}


def test_a_sender_has_a_budget_that_fills_again_and_may_lose_it() -> None:
    flood = Flood()
    heard = [flood.hear(A, raw(number), 0.0) for number in range(int(BURST) + 1)]
    assert heard == [True] * int(BURST) + [False]
    assert flood.hear(B, raw(1), 0.0), "others have their own"
    assert flood.hear(A, raw(1), 0.01)
    flood.mute(A, 1.0)
    assert not flood.hear(A, raw(2), 60.0)
    assert flood.hear(A, raw(2), 61.1)


@given(st.lists(st.tuples(st.sampled_from([A, B, C]), st.integers(0, 5), st.booleans()), max_size=40))
@settings(max_examples=100, deadline=None)
def test_nobody_is_ever_sent_what_they_have(steps: list[tuple[str, int, bool]]) -> None:
    flood, has = Flood(), {peer: set[bytes]() for peer in (A, B, C)}
    for sender, number, flush in steps:
        if flood.hear(sender, raw(number), 0.0):
            flood.spread(raw(number), sender)
        has[sender].add(raw(number))
        if flush:
            for peer, records in flood.batches([A, B, C]).items():
                assert not has[peer].intersection(records)
                has[peer].update(records)
    flood_end = flood.batches([A, B, C])
    assert {p: h | set(flood_end.get(p, ())) for p, h in has.items()} == dict.fromkeys(
        has, set().union(*has.values())
    )


def test_memory_is_bounded() -> None:
    flood = Flood()
    for number in range(MAX_SEEN + 10):
        flood.spread(raw(number))
    assert len(flood.batches([A])[A]) == MAX_GOSSIP_RECORDS
    sent = MAX_GOSSIP_RECORDS
    while not flood.idle:
        sent += len(flood.batches([A])[A])
    assert sent == MAX_PENDING


def test_a_record_reaches_256_peers_in_six_rounds() -> None:
    """Each chooses three neighbours; a round is a batch. Copies that come in: one for each link, and those
    that two peers send each other at the same time.
    """
    rng, count = random.Random(4), 256
    neighbours: list[set[str]] = [set() for _ in range(count)]
    for own in range(count):
        for other in rng.sample([peer for peer in range(count) if peer != own], CHOSEN):
            neighbours[own].add(str(other))
            neighbours[other].add(str(own))
    floods = [Flood() for _ in range(count)]
    copies: Counter[int] = Counter()
    floods[0].spread(raw(1))
    reached, rounds = {0}, 0
    while len(reached) < count:
        rounds += 1
        sent = [flood.batches(neighbours[own]) for own, flood in enumerate(floods)]
        for own, batches in enumerate(sent):
            for peer in map(int, batches):
                copies[peer] += 1
                if floods[peer].hear(str(own), raw(1), 0.0):
                    floods[peer].spread(raw(1), str(own))
                    reached.add(peer)
    assert rounds <= 6
    assert copies.total() / count < 2 * CHOSEN


class FakeLinks:
    """Links that come up unless the peer is dead, and keep what is sent."""

    def __init__(self) -> None:
        self.up: set[str] = set()
        self.dead: set[str] = set()
        self.sent: list[tuple[str, tuple[bytes, ...]]] = []

    def peers(self) -> set[str]:
        return set(self.up)

    async def ensure(self, peer: str, addresses: object, certificate: bytes) -> None:
        if peer in self.dead:
            raise LinkError("dead")
        self.up.add(peer)

    def send(self, peer: str, message: Gossip) -> None:
        if peer not in self.up:
            raise LinkError("no link")
        self.sent.append((peer, message.records))


class Host:
    """A gossiper with its surroundings."""

    def __init__(self, others: int = 0) -> None:
        self.now = 100.0
        self.view, self.links = View(SWARM), FakeLinks()
        self.others = [Identity.from_seed(bytes([9, number]) * 16) for number in range(others)]
        for identity in self.others:
            self.view.apply(record(identity, peer_body()), self.now)
        self.accepted: list[Record] = []
        self.gossiper = Gossiper(
            own=OWN.peer_id,
            swarm=SWARM,
            links=self.links,  # type: ignore[arg-type]
            view=self.view,
            open_checked=open_record,
            accept=self._accept,
            introduce=lambda: [b"hello"],
            renew=lambda: b"again",
            rng=random.Random(1),
            clock=lambda: self.now,
        )

    def _accept(self, taken: Record) -> bool:
        self.accepted.append(taken)
        return self.view.apply(taken, self.now)

    async def look_after(self) -> None:
        await self.gossiper._look_after()


def test_news_are_checked_and_passed_on() -> None:
    host = Host()
    host.links.up = {A, B}
    news = record(ONE, metrics_body(), seq=5)
    host.gossiper.receive(B, Gossip((record(ONE, metrics_body(), seq=4).raw,)))
    host.gossiper.receive(A, Gossip((news.raw,)))
    host.gossiper.receive(A, Gossip((record(ONE, metrics_body(), seq=3).raw,)))
    assert [taken.seq for taken in host.accepted] == [4, 5], "what is older than the view is not looked at"
    host.gossiper.pass_on_now()
    assert dict(host.links.sent)[B] == (news.raw,)


def test_who_passes_on_forgeries_is_not_heard_for_a_while() -> None:
    good = record(ONE, metrics_body(), seq=2).raw
    forged = record(ONE, metrics_body(), seq=3).raw[:-1] + b"\0"
    foreign = record(ONE, metrics_body(), seq=3, swarm=bytes(20)).raw
    index = record(ONE, SwarmBody("m", "f", 3), seq=3).raw
    for bad in (forged, foreign, index, b"garbage"):
        host = Host()
        host.gossiper.receive(A, Gossip((bad, good)))
        assert host.accepted == []
        host.gossiper.receive(A, Gossip((good,)))
        assert host.accepted == []
        host.gossiper.receive(B, Gossip((good,)))
        assert len(host.accepted) == 1


async def test_three_neighbours_are_kept_and_replaced() -> None:
    host = Host(others=6)
    dead = host.others[0].peer_id
    host.links.dead = {dead}
    for _ in range(3):
        await host.look_after()
        host.now += 0.1
    chosen = set(host.gossiper.neighbours)
    assert len(chosen) == CHOSEN
    assert dead not in chosen
    assert sorted(host.links.sent) == sorted((peer, (b"hello",)) for peer in chosen)
    gone = min(chosen)
    host.links.up.discard(gone)
    host.links.dead.add(gone)
    host.gossiper.link_down(gone)
    for _ in range(3):
        await host.look_after()
        host.now += 0.1
    assert len(set(host.gossiper.neighbours) - {gone, dead}) == CHOSEN


async def test_neighbours_are_reminded_and_choosers_are_served_while_they_remind() -> None:
    host = Host(others=3)
    await host.look_after()
    host.links.sent.clear()
    host.links.up.add(A)
    host.gossiper.receive(A, Gossip(()))
    assert A in host.gossiper.neighbours
    host.now += 10.1
    for identity in host.others:
        host.view.apply(record(identity, peer_body(), seq=2), host.now)
    await host.look_after()
    assert {records for _, records in host.links.sent} == {(b"again",)}
    assert A in host.gossiper.neighbours
    host.now += 20
    await host.look_after()
    assert A not in host.gossiper.neighbours
