"""A node among strangers who send what they like: it stays up, stays right, and is no weapon."""

from __future__ import annotations

import asyncio
import os
import random

import msgpack
import pytest
from support.bodies import METRICS, SWARM
from support.dht import KEY, Network, Stranger, address_of, eventually, method_of, protocol_of

from p2pllm.dht import Contact
from p2pllm.identity import Identity
from p2pllm.records import seal


async def test_500_hostile_datagrams_change_nothing(network: Network, stranger: Stranger) -> None:
    nodes = await network.joined(3)
    rng = random.Random(0)
    await stranger.ask(nodes[0], "ping")
    good = b"\0" + os.urandom(20) + msgpack.packb(["find_node", stranger.token, stranger.id, KEY, 20])
    hostile_requests = [
        ["ping", [b"\0" + network.identities[nodes[1]].node_id]],  # what stops the package for good
        ["ping", stranger.token, b"\0" + network.identities[nodes[1]].node_id],
        ["ping", stranger.token, network.identities[nodes[0]].node_id],
        ["find_node", stranger.token, stranger.id],
        ["find_node", stranger.token, stranger.id, b"short", 20],
        ["find_node", stranger.token, stranger.id, KEY, 10**9],
        ["rput", stranger.token, stranger.id, KEY, 5000, b"not a record"],
        ["rput", stranger.token, stranger.id, KEY, "long", b""],
        ["rput", stranger.token, stranger.id, KEY, -(2**63), network.record(nodes[1])],
        ["rget", stranger.token, stranger.id, KEY, -1],
        ["rget", stranger.token, stranger.id, [KEY], 2**64 - 1],
        ["rget", stranger.token, stranger.id, b"", 0],
        ["digest", stranger.token, stranger.id, KEY, None],
        ["digest", stranger.token, stranger.id, 0, 0],
        ["pick", stranger.token, stranger.id, KEY, bytes(21 * 33)],
        ["pick", stranger.token, stranger.id, KEY, b"\xff" * 21],
        ["pick", stranger.token, stranger.id, KEY, []],
        ["hello", bytes(8), stranger.id],
        ["hello", stranger.token, stranger.id, {}],
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
    await network.still_works(*nodes)


async def test_nobody_unproven_gets_more_than_he_sent(network: Network, stranger: Stranger) -> None:
    """Nor anything else: what a node sends to an address that proved nothing is the one answer, no longer.

    The package answers a short ping from a forged address with all that it holds.
    """
    nodes = await network.joined(10)
    for _ in range(10):
        await nodes[0].put(KEY, seal(Identity.generate(), METRICS, swarm=SWARM, seq=1, ttl=5.0))
    requests = (
        ("ping",),
        ("hello", bytes(96)),
        ("find_node", KEY, 20),
        ("rget", KEY, 0),
        ("digest", KEY, 0),
        ("pick", KEY, bytes(21)),
        ("rput", KEY, 5000, network.record(nodes[1])),
    )
    for request in requests:
        stranger.token = bytes(8)
        sent, reply, result = await stranger.ask(nodes[0], *request)
        assert len(reply) <= len(sent)
        assert (result is None) is (request[0] not in ("ping", "hello"))
    stranger.token = bytes(8)
    assert (await stranger.ask(nodes[0], "hello"))[2] is None, "the answer would be longer"
    stranger.send(b"\0" + os.urandom(20) + msgpack.packb(["", bytes(8), stranger.id]), nodes[0])
    assert stranger.asked == []
    assert stranger.received.empty()
    # With the token that came with the answer, the same questions are answered.
    await stranger.ask(nodes[0], "ping")
    _, _, contacts = await stranger.ask(nodes[0], "find_node", KEY, 20)
    assert len(contacts) >= 8 * 26
    for method in ("rget", "digest"):
        _, reply, (_, _, items) = await stranger.ask(nodes[0], method, KEY, 0)
        assert items
        assert len(reply) <= 1200


async def test_one_who_asks_for_everything_at_once_is_cut_off_and_others_are_not(
    network: Network, stranger: Stranger
) -> None:
    nodes = await network.joined(2)
    await stranger.ask(nodes[0], "ping")
    limits = protocol_of(nodes[0])._limits
    while limits.allows(stranger.address, network.clock(), proven=True):
        pass
    stranger.send(stranger.request("find_node", KEY, 20), nodes[0])
    await network.still_works(*nodes)
    assert stranger.received.empty()


async def test_who_sends_forged_records_soon_gets_no_answer(network: Network, stranger: Stranger) -> None:
    """Each costs its receiver a signature check, so it costs its sender as much as many requests."""
    nodes = await network.joined(2)
    node = nodes[0]
    await stranger.ask(node, "ping")
    limits = protocol_of(node)._limits
    for _ in range(50):
        raw = seal(Identity.generate(), METRICS, swarm=SWARM, seq=1, ttl=5.0)
        stranger.send(stranger.request("rput", KEY, 5000, raw[:-1] + bytes([raw[-1] ^ 1])), node)
    await network.still_works(*nodes)  # it has read what came before
    await asyncio.sleep(0.05)
    assert not limits.allows(stranger.address, network.clock(), proven=True)


RUBBISH = random.Random(7).randbytes(26 * 50)


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
        [[RUBBISH[:20], "127.0.0.1", 70000]],  # what closes the package's socket for good
        [RUBBISH[:20], 7, 7600],
        (RUBBISH[:20] + b"\x7f\0\0\1\0\0") * 3,
        RUBBISH,
        [0, True, []],
        [0, True, b""],
        [5, False, [7]],
        [5, True, [[1, 2, 3]]],
        [0, False, [[1, b"raw"]]],
        [0, False, b"\xff" * 33 * 3],
        [-1, False, []],
        [2**64 - 1, True, RUBBISH[:33]],
    ],
    ids=lambda result: str(result)[:30],
)
async def test_a_replier_that_answers_rubbish_hurts_nobody(
    network: Network, stranger: Stranger, result: object
) -> None:
    nodes = await network.joined(3)
    stranger.answer = lambda request: (
        stranger.polite(request)
        if method_of(request) in ("ping", "hello")
        else stranger.reply_to(request, result)
    )
    for node in nodes:
        await node.bootstrap([stranger.address])
    assert Contact(stranger.id, *stranger.address) in nodes[0].contacts()
    await network.still_works(*nodes)


async def test_an_answer_from_another_address_does_not_count(network: Network, stranger: Stranger) -> None:
    """Somebody who saw the nonce still cannot answer for another."""
    node, other = await network.node(), await network.node()
    overheard: list[bytes] = []

    def overhear(request: bytes) -> None:
        overheard.append(request)

    stranger.answer = overhear
    joining = asyncio.create_task(node.bootstrap([stranger.address]))
    await eventually(lambda: bool(overheard))
    protocol_of(other).transport.sendto(stranger.reply_to(overheard[0], True), address_of(node))
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
    assert [held.record.raw for held in await node.read(KEY)] == [new]
    network.clock.now += 5.1
    assert await node.read(KEY) == [], "its life is what its owner signed, not what a stranger says"
