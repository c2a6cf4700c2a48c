"""Replicas that lie: they can hide records for a moment, not forge or revive them, nor hold anybody up."""

from __future__ import annotations

import asyncio
import os

import pytest
from support.bodies import METRICS, SWARM
from support.dht import KEY, Network, Stranger, address_of, method_of, protocol_of

from p2pllm.dht import Contact
from p2pllm.identity import Identity
from p2pllm.records import seal


async def test_a_replica_that_hides_a_record_is_found_out_by_another(
    network: Network, stranger: Stranger
) -> None:
    """Whichever of the two is asked for what is new, the digests of the other show what is missing."""
    nodes = await network.joined(2)
    reader = await network.node()
    await network.publish(*nodes)
    stranger.answer = stranger.polite
    await reader.bootstrap([address_of(nodes[0]), stranger.address])
    overlay = reader._overlays[0]
    overlay.is_near = lambda *_: False  # or its own storage would be asked first
    for _ in range(20):
        assert await network.read_by(reader) == network.ids(*nodes)
        network.clock.now += 1.0
        await network.publish(*nodes)
    assert {"rget", "digest"} <= set(stranger.asked)


async def test_a_replica_can_hide_records_but_neither_forge_nor_revive_them(
    network: Network, stranger: Stranger
) -> None:
    owner = Identity.generate()
    true, old = (seal(owner, METRICS, swarm=SWARM, seq=seq, ttl=5.0) for seq in (9, 8))
    forged = true[:-64] + os.urandom(64)
    elsewhere = seal(owner, METRICS, swarm=bytes(20), seq=10, ttl=5.0)
    items = [[600_000, raw] for raw in (forged, elsewhere, true, old, b"", b"\x93")]
    node = await network.node()
    stranger.answer = stranger.polite_but("rget", [1, False, items])
    await node.bootstrap([stranger.address])
    node._overlays[0].is_near = lambda *_: False
    assert [held.record.raw for held in await node.read(KEY)] == [true]
    network.clock.now += 5.1
    assert await node.read(KEY) == [], "no longer than its owner signed"
    assert await node.read(KEY) == [], "and not once more"


async def test_a_replica_that_gives_forged_records_is_read_no_further(
    network: Network, stranger: Stranger
) -> None:
    node = await network.node()
    versions = iter(range(1, 10**9))

    def forge(request: bytes) -> bytes:
        if method_of(request) != "rget":
            return stranger.polite(request)
        raw = seal(Identity.generate(), METRICS, swarm=SWARM, seq=1, ttl=5.0)
        return stranger.reply_to(request, [next(versions), True, [[5000, raw[:-64] + os.urandom(64)]]])

    stranger.answer = forge
    await node.bootstrap([stranger.address])
    node._overlays[0].is_near = lambda *_: False
    assert await node.read(KEY) == []
    assert stranger.asked.count("rget") == 1


async def test_a_replica_that_never_comes_to_an_end_does_not_hold_up_a_read(
    network: Network, stranger: Stranger
) -> None:
    nodes = await network.joined(2)
    await network.publish(*nodes)
    versions = iter(range(1, 10**9))
    raws = [seal(Identity.generate(), METRICS, swarm=bytes(20), seq=1, ttl=5.0) for _ in range(3)]

    def on_and_on(request: bytes) -> bytes:
        match method_of(request):
            case "rget":
                return stranger.reply_to(request, [next(versions), True, [[5000, raw] for raw in raws]])
            case "digest":
                return stranger.reply_to(request, [next(versions), True, os.urandom(33)])
        return stranger.polite(request)

    stranger.answer = on_and_on
    await nodes[0].bootstrap([stranger.address])
    nodes[0]._overlays[0].is_near = lambda *_: False
    for _ in range(4):
        assert await network.read_by(nodes[0]) == network.ids(*nodes)
    assert stranger.asked.count("rget") <= 4 * 256
    assert stranger.asked.count("digest") <= 4 * 256


async def test_a_replica_that_takes_its_time_does_not_hold_up_the_owner(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it could keep a leader from being seen to renew its claim."""
    nodes = await network.joined(3)
    monkeypatch.setattr("p2pllm.dht.node.PUT_DEADLINE_S", 0.2)
    protocol = protocol_of(nodes[0])
    store, slow = protocol.store, network.identities[nodes[1]].node_id

    async def store_slowly(contact: Contact, key: bytes, raw: bytes, life: float) -> bool | None:
        if contact.id == slow:
            await asyncio.Event().wait()
        return await store(contact, key, raw, life)

    monkeypatch.setattr(protocol, "store", store_slowly)
    assert await nodes[0].put(KEY, network.record(nodes[0])) == 2, "it itself and the third"
