"""Nodes on real sockets: joining, publishing, reading, and what death and return of others do to that."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import socket

import pytest
from support.bodies import METRICS, PEER, SWARM
from support.dht import KEY, Network, Stranger, address_of, eventually, protocol_of

from p2pllm.dht import Contact, DhtNode
from p2pllm.errors import PortTakenError, RecordError, UsageError
from p2pllm.identity import Identity
from p2pllm.records import SwarmBody, seal, swarms_key


async def test_a_swarm_of_one_reads_what_it_put(network: Network) -> None:
    node = await network.node()
    assert await node.put(KEY, raw := network.record(node)) == 1
    assert [held.record.raw for held in await node.read(KEY)] == [raw]


async def test_what_one_puts_the_others_read(network: Network) -> None:
    nodes = await network.joined(4)
    raw = network.record(nodes[0], PEER)
    assert await nodes[0].put(KEY, raw) == 4
    for node in nodes:
        ((record, life),) = await node.read(KEY)
        assert (record.raw, record.kind) == (raw, "peer")
        assert record.peer_id == network.identities[nodes[0]].peer_id
        assert life == 5.0


async def test_everybody_reads_everybody(network: Network) -> None:
    nodes = await network.joined(12)
    await network.publish(*nodes)
    for node in nodes:
        assert await network.read_by(node) == network.ids(*nodes)


async def test_a_newer_record_replaces_the_older_of_its_kind_only(network: Network) -> None:
    one, other = await network.joined(2)
    for body in (PEER, METRICS):
        await one.put(KEY, network.record(one, body, seq=5))
    await one.put(KEY, network.record(one, METRICS, seq=6))
    assert {(held.record.kind, held.record.seq) for held in await other.read(KEY)} == {
        ("peer", 5),
        ("metrics", 6),
    }
    assert await one.put(KEY, network.record(one, METRICS, seq=4)) == 0, "nobody takes an older one"
    assert {(held.record.kind, held.record.seq) for held in await other.read(KEY)} == {
        ("peer", 5),
        ("metrics", 6),
    }


async def test_a_record_dies_everywhere_when_its_life_is_over(network: Network) -> None:
    nodes = await network.joined(3)
    await nodes[0].put(KEY, network.record(nodes[0], ttl=5.0))
    network.clock.now += 4.9
    assert [len(await node.read(KEY)) for node in nodes] == [1, 1, 1]
    network.clock.now += 0.2
    assert [len(await node.read(KEY)) for node in nodes] == [0, 0, 0]


async def test_reading_hands_no_life_on(network: Network) -> None:
    """A node that reads late gets the rest of the life, however often it is read from there."""
    nodes = await network.joined(2)
    await nodes[0].put(KEY, network.record(nodes[0], ttl=5.0))
    network.clock.now += 4.0
    late = await network.node()
    await late.bootstrap([address_of(nodes[1])])
    assert len(await late.read(KEY)) == 1
    network.clock.now += 1.1
    assert await late.read(KEY) == []


async def test_a_long_directory_comes_in_pages(network: Network) -> None:
    nodes = await network.joined(2)
    for _ in range(30):
        await nodes[0].put(KEY, seal(Identity.generate(), METRICS, swarm=SWARM, seq=1, ttl=5.0))
    assert len(await nodes[1].read(KEY)) == 30


async def test_a_record_that_is_not_valid_or_not_of_this_key_is_not_put(network: Network) -> None:
    node = await network.node()
    raw = network.record(node)
    with pytest.raises(RecordError):
        await node.put(KEY, raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(RecordError):
        await node.put(swarms_key(SWARM), raw)
    assert await node.read(KEY) == []


async def test_swarms_are_indexed_under_their_own_key(network: Network) -> None:
    nodes = await network.joined(3)
    body = SwarmBody("SmolLM2-135M-Instruct", "abc", 30)
    await nodes[0].put(swarms_key(SWARM), network.record(nodes[0], body))
    assert [held.record.body() for held in await nodes[2].read(swarms_key(SWARM))] == [body]
    assert await nodes[2].read(KEY) == []


async def test_with_a_quarter_dead_every_living_record_is_read(network: Network) -> None:
    nodes = await network.joined(12)
    await network.publish(*nodes)
    dead = random.Random(0).sample(nodes, 3)
    living = [node for node in nodes if node not in dead]
    for node in dead:
        await node.close()
    for seen in await asyncio.gather(*map(network.read_by, living)):
        assert seen >= network.ids(*living)
    for _ in range(2):
        await asyncio.gather(*map(network.publish, living))
        network.clock.now += 4.0
    for seen in await asyncio.gather(*map(network.read_by, living)):
        assert seen == network.ids(*living)


async def test_a_dead_node_is_asked_once_and_then_left_alone(network: Network, stranger: Stranger) -> None:
    node = await network.node()
    stranger.answer = stranger.polite
    await node.bootstrap([stranger.address])
    assert node.contacts() == [Contact(stranger.id, *stranger.address)]
    stranger.answer = lambda _: None
    stranger.asked.clear()
    await node.put(KEY, network.record(node))
    await eventually(lambda: len(stranger.asked) == 2)  # two tries of one question
    for _ in range(3):
        await node.put(KEY, network.record(node))
        await node.read(KEY)
    assert len(stranger.asked) == 2
    assert node.contacts() == []
    network.clock.now += 8.1
    stranger.answer = stranger.polite
    await node.put(KEY, network.record(node))
    assert node.contacts() == [Contact(stranger.id, *stranger.address)]


async def test_a_silent_node_is_not_named_to_others(network: Network, stranger: Stranger) -> None:
    one, other = await network.joined(2)
    stranger.answer = stranger.polite
    await one.bootstrap([stranger.address])
    stranger.answer = lambda _: None
    await one.put(KEY, network.record(one))
    stranger.asked.clear()
    newcomer = await network.node()
    await newcomer.bootstrap([address_of(one)])
    assert {contact.id for contact in newcomer.contacts()} == {
        network.identities[node].node_id for node in (one, other)
    }
    assert stranger.asked == []


async def test_refreshing_finds_strangers_and_notices_who_died_quietly(
    network: Network, stranger: Stranger
) -> None:
    node, far = await network.joined(2)
    await far.bootstrap([stranger.address])
    assert node.contacts() == [Contact(network.identities[far].node_id, *address_of(far))]
    stranger.answer = stranger.polite
    await far.bootstrap([stranger.address])
    await node._overlays[0].refresh()
    assert Contact(stranger.id, *stranger.address) in node.contacts()
    stranger.answer = lambda _: None
    for _ in range(3):
        network.clock.now += 65.0
        await node._overlays[0].refresh()
        assert Contact(stranger.id, *stranger.address) not in node.contacts()
    assert protocol_of(node).router.get(stranger.id) is None, "its place is free after three misses"


async def test_a_node_that_restarts_in_its_place_is_read_from_the_beginning(network: Network) -> None:
    """Its versions count anew: a reader that went on from the old ones would miss what it holds now."""
    reader = await network.node()
    keeper = DhtNode(identity := Identity.generate(), clock=network.clock)
    network.identities[keeper] = identity
    await keeper.start(["127.0.0.1"], 0)
    port = keeper.port
    await reader.bootstrap([("127.0.0.1", port)])
    for seq in range(1, 6):
        await keeper.put(KEY, network.record(keeper, seq=seq))
    assert await network.read_by(reader) == {identity.peer_id}
    await keeper.close()
    await keeper.start(["127.0.0.1"], port)
    owner = Identity.generate()
    await keeper.put(KEY, seal(owner, METRICS, swarm=SWARM, seq=1, ttl=5.0))
    assert owner.peer_id in await network.read_by(reader)


async def test_bootstrap_counts_who_answers_and_survives_who_does_not(network: Network) -> None:
    one, other, third = await network.node(), await network.node(), await network.node()
    await other.close()
    dead = ("127.0.0.1", third.port)
    await third.close()
    addresses = [dead, ("nobody.invalid", 7600), ("localhost", one.port), ("..", 1)]
    newcomer = await network.node()
    assert await newcomer.bootstrap(addresses) == 1
    assert await newcomer.bootstrap([dead]) == 0
    assert await newcomer.bootstrap([]) == 0
    assert await newcomer.bootstrap([address_of(newcomer)]) == 0, "one's own answer is nobody's"
    with pytest.raises(UsageError, match="a port is a number from 1 to 65535"):
        await newcomer.bootstrap([("127.0.0.1", 70000)])
    assert [contact.id for contact in newcomer.contacts()] == [network.identities[one].node_id]


async def test_whom_we_ask_gets_to_know_us(network: Network) -> None:
    one, other = await network.node(), await network.node()
    await one.bootstrap([address_of(other)])
    own = Contact(network.identities[one].node_id, *address_of(one))
    await eventually(lambda: other.contacts() == [own])


async def test_a_port_in_use_is_a_usage_error(network: Network) -> None:
    node, second = await network.node(), DhtNode(Identity.generate())
    with pytest.raises(PortTakenError, match=rf"127\.0\.0\.1:{node.port} \(UDP\), Address already in use"):
        await second.start(["127.0.0.1"], node.port)
    await second.close()


@pytest.mark.parametrize(
    "hosts", [["nobody.invalid"], ["192.0.2.1"], ["127.0.0.1", "127.0.0.2"], [".." * 40]]
)
async def test_hosts_that_are_not_this_machines_or_too_many_are_a_usage_error(hosts: list[str]) -> None:
    with pytest.raises(UsageError, match=f"cannot listen on {re.escape(hosts[-1])}.* --host"):
        await DhtNode(Identity.generate()).start(hosts, 0)


async def test_closing_frees_the_port_and_ends_what_is_under_way(
    network: Network, stranger: Stranger
) -> None:
    node = await network.node()
    stranger.answer = stranger.polite
    await node.bootstrap([stranger.address])
    stranger.answer = lambda _: None
    reading = asyncio.create_task(node.read(KEY))
    await eventually(lambda: stranger.asked[-1] == "find_node" and not reading.done())
    port = node.port
    await node.close()
    assert await reading == []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("127.0.0.1", port))
    await node.close()


async def test_a_cancelled_put_leaves_nothing_behind(network: Network, stranger: Stranger) -> None:
    node = await network.node()
    stranger.answer = stranger.polite
    await node.bootstrap([stranger.address])
    stranger.answer = lambda _: None
    stranger.asked.clear()
    putting = asyncio.create_task(node.put(KEY, network.record(node)))
    await eventually(lambda: bool(stranger.asked))
    putting.cancel()
    await asyncio.wait([putting])
    assert putting.cancelled()
    assert protocol_of(node)._questions == {}
    assert len(await node.read(KEY)) == 1


def test_nodes_live_on_uvloop_as_well() -> None:
    async def put_and_read() -> list[bytes]:
        one, other = (DhtNode(identity) for identity in identities)
        await one.start(["127.0.0.1"], 0)
        await other.start(["127.0.0.1"], 0)
        assert await other.bootstrap([("127.0.0.1", 1), address_of(one)]) == 1
        await other.put(KEY, raw)
        found = [held.record.raw for held in await one.read(KEY)]
        with pytest.raises(UsageError, match="Address already in use"):
            await DhtNode(Identity.generate()).start(["127.0.0.1"], one.port)
        await one.close()
        await other.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return found

    uvloop = pytest.importorskip("uvloop")
    identities = Identity.generate(), Identity.generate()
    raw = seal(identities[1], METRICS, swarm=SWARM, seq=1, ttl=5.0)
    assert uvloop.run(put_and_read()) == [raw]


async def test_the_package_underneath_writes_no_log(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        nodes = await network.joined(3)
        await network.publish(*nodes)
    assert [line for line in caplog.records if line.name.startswith(("kademlia", "rpcudp"))] == []
