"""A node among strangers who send what they like: it stays up, stays right, and is no weapon."""

from __future__ import annotations

import asyncio
import os
import random

import msgpack
import pytest
from support.bodies import METRICS, SWARM
from support.dht import KEY, Network, Stranger, address_of, eventually

from p2pllm.dht import DhtNode
from p2pllm.identity import Identity
from p2pllm.records import seal


def method_of(request: bytes) -> str:
    return str(msgpack.unpackb(request[21:])[0])


async def still_works(network: Network, *nodes: DhtNode) -> None:
    """All of them publish, and all read all."""
    await network.publish(*nodes)
    for node in nodes:
        assert await network.read_by(node) >= network.ids(*nodes)


async def test_500_hostile_datagrams_change_nothing(network: Network, stranger: Stranger) -> None:
    nodes = await network.joined(3)
    rng = random.Random(0)
    await stranger.ask(nodes[0], "ping")
    good = b"\0" + os.urandom(20) + msgpack.packb(["find_node", stranger.token, stranger.id, KEY])
    hostile_requests = [
        ["ping", [b"\0" + network.identities[nodes[1]].node_id]],  # what stops the package for good
        ["ping", stranger.token, b"\0" + network.identities[nodes[1]].node_id],
        ["ping", stranger.token, network.identities[nodes[0]].node_id],
        ["find_node", stranger.token, stranger.id],
        ["find_node", stranger.token, stranger.id, b"short"],
        ["find_node", stranger.token, stranger.id, None, None],
        ["rput", stranger.token, stranger.id, KEY, 5000, b"not a record"],
        ["rput", stranger.token, stranger.id, KEY, "long", b""],
        ["rput", stranger.token, stranger.id, KEY, -(2**63), network.record(nodes[1])],
        ["rget", stranger.token, stranger.id, KEY, -1],
        ["rget", stranger.token, stranger.id, [KEY], 2**64 - 1],
        ["rget", stranger.token, stranger.id, b"", 0],
        ["store", stranger.token, stranger.id, KEY, b"value"],
        ["find_value", stranger.token, stranger.id, KEY],
        ["stun", stranger.token, stranger.id],
        ["__init__", stranger.token, stranger.id],
        ["close", stranger.token, stranger.id],
    ]
    for number in range(500):
        match number % 4:
            case 0:
                datagram = rng.randbytes(rng.randrange(1, 1600))
            case 1:
                position = rng.randrange(len(good))
                datagram = good[:position] + rng.randbytes(1) + good[position + 1 :]
            case 2:
                datagram = b"\0" + rng.randbytes(20) + msgpack.packb(rng.choice(hostile_requests))
            case _:
                datagram = b"\1" + rng.randbytes(20) + msgpack.packb([stranger.id, bytes(8), [[1]]])
        stranger.send(datagram, nodes[number % 3])
    await still_works(network, *nodes)


async def test_nobody_unproven_gets_more_than_he_sent(network: Network, stranger: Stranger) -> None:
    """Nor anything else: what a node sends to an address that proved nothing is the one answer, no longer."""
    nodes = await network.joined(10)
    for _ in range(10):
        await nodes[0].put(KEY, seal(Identity.generate(), METRICS, swarm=SWARM, seq=1, ttl=5.0))
    requests = (
        ("ping",),
        ("find_node", KEY),
        ("rget", KEY, 0),
        ("rput", KEY, 5000, network.record(nodes[1])),
    )
    for request in requests:
        stranger.token = bytes(8)
        sent, reply, result = await stranger.ask(nodes[0], *request)
        assert len(reply) <= len(sent)
        assert result is (True if request == ("ping",) else None)
    assert stranger.asked == []
    assert stranger.received.empty()
    # With the token that came with the answer, the same questions are answered.
    _, _, contacts = await stranger.ask(nodes[0], "find_node", KEY)
    assert len(contacts) >= 8
    _, reply, (_, more, items) = await stranger.ask(nodes[0], "rget", KEY, 0)
    assert more
    assert items
    assert len(reply) <= 1200


async def test_a_token_is_good_for_one_address_and_one_node(network: Network, stranger: Stranger) -> None:
    one, other = await network.joined(2)
    await stranger.ask(one, "ping")
    assert (await stranger.ask(one, "find_node", KEY))[2] is not None
    assert (await stranger.ask(other, "find_node", KEY))[2] is None


async def test_a_node_enters_the_table_only_by_answering(network: Network, stranger: Stranger) -> None:
    node = await network.node()
    await node.put(KEY, network.record(node))
    await stranger.ask(node, "ping")
    await stranger.ask(node, "find_node", KEY)
    await eventually(lambda: len(stranger.asked) == 2)
    assert stranger.asked == ["ping", "ping"], "two tries, and no record is handed over unasked"
    assert node.contacts() == []
    stranger.answer = stranger.polite
    await eventually(lambda: not node._protocol._greetings)
    await stranger.ask(node, "find_node", KEY)
    await eventually(lambda: node.contacts() == [(stranger.id, *stranger.address)])


async def test_an_id_cannot_be_taken_over_while_its_owner_answers(
    network: Network, stranger: Stranger
) -> None:
    one, other = await network.joined(2)
    stranger.id = network.identities[other].node_id
    stranger.answer = stranger.polite
    await stranger.ask(one, "ping")
    await stranger.ask(one, "find_node", KEY)
    await eventually(lambda: not one._protocol._greetings)
    assert one.contacts() == [(network.identities[other].node_id, *address_of(other))]
    await still_works(network, one, other)


async def test_one_who_asks_for_everything_at_once_is_cut_off_and_others_are_not(
    network: Network, stranger: Stranger
) -> None:
    nodes = await network.joined(2)
    await stranger.ask(nodes[0], "ping")
    request = b"\0" + os.urandom(20) + msgpack.packb(["find_node", stranger.token, stranger.id, KEY])
    limit = nodes[0]._protocol._limit
    while limit.allows(stranger.address, network.clock()):
        pass
    stranger.send(request, nodes[0])
    await still_works(network, *nodes)
    assert stranger.received.empty()


BAD_CONTACTS = [
    [os.urandom(20), "127.0.0.1", 70000],
    [os.urandom(20), "127.0.0.1", -1],
    [os.urandom(20), 7, 7600],
    [os.urandom(20), "host.invalid", 7600],
    [os.urandom(20), "::1", 7600],
    [b"\0" + os.urandom(20), "127.0.0.1", 7600],
    [os.urandom(21), "127.0.0.1", 7600],
    ["id", "127.0.0.1", 7600],
    [],
    7,
    None,
]


@pytest.mark.parametrize(
    "result",
    [
        7,
        "text",
        b"bytes",
        {},
        [],
        [7],
        [[]],
        BAD_CONTACTS,
        [0, True, []],
        [5, False, [7]],
        [0, False, [[1, b"raw"]]],
    ],
    ids=str,
)
async def test_a_replier_that_answers_rubbish_hurts_nobody(
    network: Network, stranger: Stranger, result: object
) -> None:
    nodes = await network.joined(3)
    stranger.answer = lambda request: (
        stranger.polite(request) if method_of(request) == "ping" else stranger.reply_to(request, result)
    )
    for node in nodes:
        await node.bootstrap([stranger.address])
    assert (stranger.id, *stranger.address) in nodes[0].contacts()
    await still_works(network, *nodes)


async def test_a_replica_can_hide_records_but_neither_forge_nor_revive_them(
    network: Network, stranger: Stranger
) -> None:
    owner = Identity.generate()
    true, old = (seal(owner, METRICS, swarm=SWARM, seq=seq, ttl=5.0) for seq in (9, 8))
    forged = true[:-64] + os.urandom(64)
    elsewhere = seal(owner, METRICS, swarm=bytes(20), seq=10, ttl=5.0)
    items = [[600_000, raw] for raw in (forged, elsewhere, true, old, b"", b"\x93")]
    node = await network.node()
    stranger.answer = lambda request: (
        stranger.reply_to(request, [1, False, items])
        if method_of(request) == "rget"
        else stranger.polite(request)
    )
    await node.bootstrap([stranger.address])
    assert [record.raw for record in await node.read(KEY)] == [true]
    network.clock.now += 5.1
    assert await node.read(KEY) == [], "no longer than its owner signed"
    assert await node.read(KEY) == [], "and not once more"


async def test_a_replica_that_never_comes_to_an_end_does_not_hold_up_a_read(
    network: Network, stranger: Stranger
) -> None:
    nodes = await network.joined(2)
    await network.publish(*nodes)
    versions = iter(range(1, 10**9))
    stranger.answer = lambda request: (
        stranger.reply_to(request, [next(versions), True, []])
        if method_of(request) == "rget"
        else stranger.polite(request)
    )
    await nodes[0].bootstrap([stranger.address])
    assert await network.read_by(nodes[0]) == network.ids(*nodes)
    assert stranger.asked.count("rget") <= 512


async def test_an_answer_from_another_address_does_not_count(network: Network, stranger: Stranger) -> None:
    """Somebody who saw the nonce still cannot answer for another."""
    node, other = await network.node(), await network.node()
    overheard: list[bytes] = []

    def overhear(request: bytes) -> None:
        overheard.append(request)

    stranger.answer = overhear
    joining = asyncio.create_task(node.bootstrap([stranger.address]))
    await eventually(lambda: bool(overheard))
    other._protocol.transport.sendto(stranger.reply_to(overheard[0], True), address_of(node))
    assert await joining == 0
    assert node.contacts() == []


async def test_one_address_cannot_fill_a_key_for_others(network: Network, stranger: Stranger) -> None:
    (node,) = await network.joined(1)
    await stranger.ask(node, "ping")
    stranger_seals = (seal(Identity.generate(), METRICS, swarm=SWARM, seq=1, ttl=5.0) for _ in range(513))
    answers = [(await stranger.ask(node, "rput", KEY, 5000, raw))[2] for raw in stranger_seals]
    assert answers == [True] * 512 + [False]
    assert await node.put(KEY, network.record(node)) == 1


async def test_what_is_stored_is_checked_as_strictly_as_what_is_read(
    network: Network, stranger: Stranger
) -> None:
    node = await network.node()
    await stranger.ask(node, "ping")
    owner = Identity.generate()
    newer, new, old = (seal(owner, METRICS, swarm=SWARM, seq=seq, ttl=5.0) for seq in (3, 2, 1))
    assert (await stranger.ask(node, "rput", KEY, 10**12, new))[2] is True
    assert (await stranger.ask(node, "rput", KEY, 5000, old))[2] is False
    assert (await stranger.ask(node, "rput", KEY, 5000, new))[2] is True
    for key, raw in (
        (KEY, newer[:-64] + os.urandom(64)),
        (bytes(20), newer),
        (b"", newer),
        (KEY, newer[:-1]),
    ):
        stranger.send(
            b"\0" + os.urandom(20) + msgpack.packb(["rput", stranger.token, stranger.id, key, 5000, raw]),
            node,
        )
    await stranger.ask(node, "ping")
    assert stranger.received.empty(), "what is malformed gets no answer"
    assert [record.raw for record in await node.read(KEY)] == [new]
    network.clock.now += 5.1
    assert await node.read(KEY) == [], "its life is what its owner signed, not what a stranger says"
