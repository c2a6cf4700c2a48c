"""Nodes that come back elsewhere, one or all at once; what is remembered of good ones; lost datagrams."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest
from support.bodies import METRICS, SWARM
from support.dht import KEY, Network, Stranger, address_of, eventually, protocol_of

from p2pllm.dht import Contact, DhtNode
from p2pllm.identity import Identity
from p2pllm.records import directory_key, seal


async def test_a_node_that_returns_on_another_port_is_found_there(network: Network) -> None:
    nodes = await network.joined(3)
    identity, old_port = network.identities[nodes[2]], nodes[2].port
    await nodes[2].close()
    returned = await network.node(identity)
    assert returned.port != old_port
    assert await returned.bootstrap([address_of(nodes[0])]) == 1
    await returned.put(KEY, network.record(returned))
    here = Contact(identity.node_id, *address_of(returned))
    await eventually(lambda: all(here in node.contacts() for node in nodes[:2]))
    for node in nodes[:2]:
        assert [contact for contact in node.contacts() if contact.id == identity.node_id] == [here]
        assert await network.read_by(node) == {identity.peer_id}


async def test_a_node_that_says_it_has_moved_is_found_there_at_once(network: Network) -> None:
    """Its old address need not be found silent first."""
    nodes = await network.joined(3)
    identity = network.identities[nodes[2]]
    await nodes[0].put(KEY, network.record(nodes[0]))
    await nodes[2].close()
    returned = await network.node(identity)
    here = Contact(identity.node_id, *address_of(returned))
    asked_before = protocol_of(nodes[0]).liveness.heard(here.address)
    nodes[0].moved(identity.node_id, [("192.0.2.1", 7600), here.address])
    await eventually(lambda: here in nodes[0].contacts())
    assert asked_before == float("-inf")
    assert [contact for contact in nodes[0].contacts() if contact.id == identity.node_id] == [here]
    assert await nodes[0].put(KEY, network.record(nodes[0])) == 3, "as a replica it is where it is now"


async def test_who_says_he_has_moved_must_prove_to_be_there(network: Network, stranger: Stranger) -> None:
    one, other = await network.joined(2)
    where = Contact(network.identities[other].node_id, *address_of(other))
    stranger.answer = stranger.polite
    one.moved(where.id, [stranger.address])
    await eventually(lambda: "hello" in stranger.asked and not protocol_of(one)._greetings)
    assert where in one.contacts()
    one.moved(where.id, [where.address, stranger.address])
    assert not protocol_of(one)._greetings, "it is at one of these addresses: nothing to do"


async def test_whoever_moves_all_the_time_cannot_send_us_all_over(network: Network) -> None:
    """Signed records are free: each could name somebody who is to be flooded."""
    one, other = await network.joined(2)
    mover = network.identities[other].node_id
    for port in range(1, 50):
        one.moved(mover, [("127.0.0.1", port)])
        one.moved(mover[::-1], [("127.0.0.1", 100 + port)])
    assert set(protocol_of(one)._greetings) == {("127.0.0.1", 1), ("127.0.0.1", 101)}
    network.clock.now += 2.0
    one.moved(mover, [("127.0.0.1", 50)])
    assert ("127.0.0.1", 50) in protocol_of(one)._greetings, "but a little later he may"


async def test_good_addresses_are_those_that_answered_lately_the_latest_first(network: Network) -> None:
    nodes = await network.joined(4)
    await nodes[2].close()
    for node in (nodes[1], nodes[3]):
        network.clock.now += 1.0
        await protocol_of(nodes[0]).ping(address_of(node))
    assert nodes[0].good()[:2] == [address_of(nodes[3]), address_of(nodes[1])]
    await protocol_of(nodes[0]).ping(("127.0.0.1", nodes[2].port))
    assert nodes[0].good() == [address_of(nodes[3]), address_of(nodes[1])]


async def test_a_process_that_is_late_itself_blames_nobody_at_once(
    network: Network, stranger: Stranger
) -> None:
    """A timer that goes off late says nothing about who was asked: the answer may be there, not yet read."""
    node = await network.node()
    protocol = protocol_of(node)
    asking = asyncio.create_task(protocol.ping(stranger.address))
    await eventually(lambda: bool(protocol._questions))
    ((nonce, question),) = protocol._questions.items()
    for late in range(1, 7):
        question.due -= 1.0
        protocol._give_up(nonce, question)
        assert (question.lags, question.tries, asking.done()) == (late, 1, False)
    question.due -= 1.0
    protocol._give_up(nonce, question)
    assert question.tries == 2, "but not for ever"
    asking.cancel()
    await asyncio.wait([asking])


class Lossy:
    """Some datagrams do not leave; which ones is drawn from a seed."""

    rng = random.Random(7)
    loss = 0.0

    def __init__(self, transport: asyncio.DatagramTransport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def sendto(self, data: bytes, address: tuple[str, int]) -> None:
        if self.rng.random() >= self.loss:
            self._transport.sendto(data, address)


async def test_lost_datagrams_lose_no_records(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a twentieth of them gone, everybody reads everybody's newest record but two, or a newer one."""
    nodes = await network.joined(5, wrap=Lossy)
    monkeypatch.setattr(Lossy, "loss", 0.05)
    published: list[int] = []
    for _ in range(5):
        network.clock.now += 1.5
        published.append(max(published, default=0) + 1)
        await asyncio.gather(*(node.put(KEY, network.record(node, seq=published[-1])) for node in nodes))
        for node in nodes:
            newest = {held.record.peer_id: held.record.seq for held in await node.read(KEY)}
            if len(published) > 3:
                assert newest.keys() == network.ids(*nodes)
                assert min(newest.values()) >= published[-3]


@pytest.mark.parametrize("count", [24, pytest.param(64, marks=pytest.mark.slow)])
def test_a_swarm_that_restarts_all_at_once_on_other_ports_is_whole_again(count: int) -> None:
    """Only one node stays, and all that it knows is where everybody used to be."""
    # As peers do; the other loop takes one datagram from each socket in a round, too slow for so many at
    # once.
    pytest.importorskip("uvloop").run(restart_storm(count))


async def restart_storm(count: int) -> None:
    identities = [Identity.generate() for _ in range(count)]

    async def start(identity: Identity) -> DhtNode:
        node = DhtNode(identity)
        await node.start(["127.0.0.1"], 0)
        return node

    async def publish_and_read(node: DhtNode, identity: Identity) -> set[str]:
        seq = round(time.time() * 1000)
        key = directory_key(SWARM, identity.node_id, 0)
        await node.put(key, seal(identity, METRICS, swarm=SWARM, seq=seq, ttl=30.0))
        return {held.record.peer_id for held in await node.read(key) if held.record.seq >= epoch}

    anchor = await start(Identity.generate())
    nodes = [await start(identity) for identity in identities]
    for node in nodes:
        await node.bootstrap([address_of(anchor)])
    await asyncio.gather(*(node.close() for node in nodes))
    epoch = round(time.time() * 1000)
    nodes = [await start(identity) for identity in identities]
    await asyncio.gather(*(node.bootstrap([address_of(anchor)]) for node in nodes))
    everybody = {identity.peer_id for identity in identities}
    async with asyncio.timeout(30):
        while True:
            views = await asyncio.gather(*map(publish_and_read, nodes, identities))
            if all(view == everybody for view in views):
                break
            await asyncio.sleep(0.2)
    here = {Contact(one.node_id, *address_of(node)) for one, node in zip(identities, nodes, strict=True)}
    for node in nodes:
        assert {contact for contact in node.contacts() if contact.address != address_of(anchor)} <= here
    await asyncio.gather(anchor.close(), *(node.close() for node in nodes))
