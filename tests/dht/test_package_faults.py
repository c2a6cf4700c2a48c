"""What is wrong with the package underneath for a live swarm, and the test that shows our node unharmed.

- a request over 8 KiB raises, a long reply vanishes or is cut in fragments: here, every datagram is small;
  `test_wire` (size is checked first)
- anyone stores anything under any key: `test_hostile` (what is stored is checked)
- no versions, no life of one's own, no bounds: `test_storage`
- a read stops at one's own copy, or at the majority of the first answers: here, a stale copy is no answer
- each replica publishes again what it has, old over new: here, nothing is sent that nobody asked for;
  `test_storage` (refused if older)
- a store that nobody answered counts as done, and raises when all are dead: here, only answers count
- 5 s for each question, and a round waits for its slowest: `test_liveness` (timeouts), `test_lookup` (no
  barrier, a quarter dead)
- one miss evicts, and the dead are named for ever: `test_liveness` (misses), `test_node` (asked once, not
  named)
- a cancelled question leaks: `test_node` (a cancelled put)
- the nearest are not the nearest: `test_table` (nearest, by brute force)
- who restarts on another port is lost: `test_moving`; `test_node` (restarts in its place)
- whoever seems new is sent all keys, at 1981 times the bytes of a forged ping: `test_hostile` (nobody
  unproven gets more), `test_identities` (enters the table)
- an empty storage is thrown away: `test_storage` (an empty storage is true)
- a dead bootstrap is never asked again: here, it is asked when it is back
- stopping leaves tasks and sockets, and state is a pickle: `conftest` (nothing is left, after every test),
  `test_node` (closing), `test_bootstrap` (JSON, checked)
- one ping with an id that equals a known one but for a leading zero stops all lookups: `test_hostile` (500
  datagrams), `test_lookup` (two addresses for one id)
- a contact with port 70000, or a host that is no string, closes the socket: `test_contacts`, `test_hostile`
  (rubbish)
- a reply from anywhere counts if its nonce is right, and a bad one raises: `test_hostile` (another address,
  rubbish), `test_fuzz`
- two loggers write 70 lines for each store: `test_node` (writes no log)
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.bodies import METRICS, PEER, SWARM, peer_body
from support.dht import KEY, Network, Stranger, address_of

from p2pllm.dht import DhtNode
from p2pllm.identity import Identity
from p2pllm.records import MAX_RECORD_BYTES, seal

IPV6_MINIMUM = 1280 - 48
"""What an unfragmented datagram carries on any path."""


class Recorder:
    """Notes what leaves a node."""

    sent: list[bytes]

    def __init__(self, transport: asyncio.DatagramTransport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def sendto(self, data: bytes, address: tuple[str, int]) -> None:
        self.sent.append(data)
        self._transport.sendto(data, address)


async def test_every_datagram_is_small(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "sent", [], raising=False)
    nodes = await network.joined(12, wrap=Recorder)
    hosts = tuple((f"{'long' * 50}.{number}.example", 7600) for number in range(4))
    owner = Identity.generate()
    large = seal(owner, peer_body(addresses=hosts[:3], hardware="x" * 90), swarm=SWARM, seq=1, ttl=5.0)
    assert 0.9 * MAX_RECORD_BYTES < len(large) <= MAX_RECORD_BYTES
    await nodes[0].put(KEY, large)
    for _ in range(40):
        await nodes[0].put(KEY, seal(Identity.generate(), METRICS, swarm=SWARM, seq=1, ttl=5.0))
    newcomer = await network.node(wrap=Recorder)
    await newcomer.bootstrap([address_of(nodes[0])])
    assert len(await newcomer.glance(KEY)) == 41  # first: of what it has read, nothing would be new
    assert len(await newcomer.read(KEY)) == 41
    assert max(map(len, Recorder.sent)) <= IPV6_MINIMUM


async def test_a_stale_copy_is_no_answer(network: Network) -> None:
    one, other, third = await network.joined(3)
    await one.put(KEY, network.record(one, PEER, seq=5))
    newer = network.record(one, PEER, seq=6)
    other._records.accept(KEY, newer, 5.0, source="", now=network.clock())
    for node in (one, third):
        for _ in range(4):  # whichever replica is asked first
            seen = {held.record.seq for held in await node.read(KEY)}
        assert seen == {6}


async def test_nothing_is_sent_that_nobody_asked_for(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No record travels but by its owner's put, or to who reads it."""
    monkeypatch.setattr(Recorder, "sent", [], raising=False)
    nodes = await network.joined(4, wrap=Recorder)
    await network.publish(*nodes)
    Recorder.sent.clear()
    newcomer = await network.node(wrap=Recorder)
    await newcomer.bootstrap([address_of(nodes[0])])
    for node in (*nodes, newcomer):
        await node._overlays[0].refresh()
    assert Recorder.sent
    assert not [datagram for datagram in Recorder.sent if SWARM in datagram]


async def test_only_answers_count_as_stored(network: Network, stranger: Stranger) -> None:
    node = await network.node()
    stranger.answer = stranger.polite
    await node.bootstrap([stranger.address])
    assert await node.put(KEY, network.record(node)) == 1, "it answered, and did not want it"
    stranger.answer = lambda _: None
    assert await node.put(KEY, network.record(node)) == 1
    assert await node.put(KEY, network.record(node)) == 1, "with nobody left alive it is kept here"


async def test_a_dead_bootstrap_is_asked_again_when_it_is_back(network: Network) -> None:
    one = await network.node()
    address = address_of(one)
    await one.close()
    node = await network.node()
    assert await node.bootstrap([address]) == 0
    back = DhtNode(network.identities[one], clock=network.clock)
    network.identities[back] = network.identities[one]
    await back.start(["127.0.0.1"], address[1])
    assert await node.bootstrap([address]) == 1
    assert len(node.contacts()) == 1
