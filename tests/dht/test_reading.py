"""Reading: each record travels once and is checked once; a glance brings digests; turns are taken."""

from __future__ import annotations

import random

import pytest
from support.dht import KEY, Network, address_of

from p2pllm.dht import Digest
from p2pllm.dht.contacts import Contact
from p2pllm.dht.pages import Part
from p2pllm.dht.reading import TURNS, Rota
from p2pllm.dht.wire import Reply
from p2pllm.records import open_record


def test_two_replicas_stay_for_a_few_turns_then_the_second_becomes_the_first() -> None:
    replicas = [Contact(bytes([n] * 20), "192.0.2.1", n) for n in range(1, 9)]
    rota = Rota(random.Random(1))
    orders = [rota.order(b"key", replicas) for _ in range(4 * TURNS)]
    assert all(sorted(order) == replicas for order in orders)
    for turn in range(0, 4 * TURNS, TURNS):
        assert len({tuple(order[:2]) for order in orders[turn : turn + TURNS]}) == 1
        if turn:
            assert orders[turn][0] == orders[turn - 1][1]
            assert orders[turn][1] != orders[turn - 1][1]
    gone = orders[-1][0]
    left = [replica for replica in replicas if replica != gone]
    assert gone not in rota.order(b"key", left)


def test_with_one_replica_it_is_always_its_turn() -> None:
    only = Contact(bytes(20), "192.0.2.1", 1)
    rota = Rota(random.Random(1))
    assert [rota.order(b"key", [only]) for _ in range(2 * TURNS)] == [[only]] * 2 * TURNS
    assert rota.order(b"key", []) == []


async def test_a_record_is_checked_once_however_often_it_comes(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[bytes] = []

    def open_counted(raw: bytes) -> object:
        checked.append(raw)
        return open_record(raw)

    nodes = await network.joined(4)
    monkeypatch.setattr("p2pllm.dht.node.open_record", open_counted)
    reader = await network.node()
    await reader.bootstrap([address_of(nodes[0])])
    reader._overlays[0].is_near = lambda *_: False  # or it would read nothing but its own storage
    for _ in range(3):
        await network.publish(*nodes)
        for _ in range(2 * TURNS):
            await reader.read(KEY)
    assert len(checked) == len(set(checked)) == 12
    reader.open(checked[0])
    assert len(checked) == 12, "nor if somebody else brings it"


async def test_reading_again_brings_only_what_is_new(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = await network.joined(4)
    await network.publish(*nodes)
    reader = await network.node()
    await reader.bootstrap([address_of(nodes[0])])
    reader._overlays[0].is_near = lambda *_: False
    for _ in range(8 * TURNS):
        assert await network.read_by(reader) == network.ids(*nodes)
    protocol = reader._overlays[0].protocol
    received: list[bytes] = []
    take = protocol._on_reply

    def note(reply: Reply, address: tuple[str, int]) -> None:
        received.append(repr(reply.result).encode())
        take(reply, address)

    monkeypatch.setattr(protocol, "_on_reply", note)
    assert await network.read_by(reader) == network.ids(*nodes)
    assert received
    assert max(map(len, received)) < 100, "two answers that there is nothing new"


async def test_a_newcomer_does_not_take_its_empty_storage_for_a_replica(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Near the key as it is: or one other replica alone could hide everything from it."""
    nodes = await network.joined(4)
    await network.publish(*nodes)
    newcomer = await network.node()
    await newcomer.bootstrap([address_of(nodes[0])])
    protocol, fetched = newcomer._overlays[0].protocol, []
    fetch = protocol.fetch

    async def note(contact: Contact, key: bytes, since: int) -> Part[tuple[bytes, float]] | None:
        fetched.append(contact)
        return await fetch(contact, key, since)

    monkeypatch.setattr(protocol, "fetch", note)
    assert await network.read_by(newcomer) == network.ids(*nodes)
    assert len(set(fetched)) == 1
    await network.publish(*nodes)  # as a replica it is told from now on
    assert await network.read_by(newcomer) == network.ids(*nodes)
    assert len(fetched) == 1


async def test_a_glance_shows_what_is_new_and_copies_nothing(network: Network) -> None:
    nodes = await network.joined(3)
    await network.publish(*nodes)
    reader = await network.node()
    await reader.bootstrap([address_of(nodes[0])])
    seen = await reader.glance(KEY)
    assert {digest.peer_id for digest in seen} == network.ids(*nodes)
    assert all(digest.kind == "metrics" and 0 < digest.life <= 5.0 for digest in seen)
    assert reader._mirror.held(KEY) == []
    assert await reader.glance(KEY) == [], "nothing new since"
    network.clock.now += 1.0
    await nodes[1].put(KEY, network.record(nodes[1], seq=99))
    expected = Digest(network.identities[nodes[1]].peer_id, "metrics", 99, 5.0)
    assert await reader.glance(KEY) == [expected]
    assert await network.read_by(reader) == network.ids(*nodes)
