"""Nodes on loopback, with a clock that only tests move, and a socket that sends what it likes."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable
from typing import Any

import msgpack

from p2pllm.dht import DhtNode
from p2pllm.identity import Identity
from p2pllm.records import Body, directory_key, seal
from support.bodies import METRICS, SWARM

KEY = directory_key(SWARM)
Address = tuple[str, int]


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Network:
    """Nodes that share one clock, and the identities behind them."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.identities: dict[DhtNode, Identity] = {}
        self._seq = itertools.count(1)

    async def node(self, identity: Identity | None = None) -> DhtNode:
        """A node that listens and knows nobody."""
        identity = identity or Identity.generate()
        node = DhtNode(identity, clock=self.clock)
        self.identities[node] = identity
        await node.start("127.0.0.1", 0)
        return node

    async def joined(self, count: int) -> list[DhtNode]:
        """Nodes of which each knows at least 8 of the others, or all."""
        nodes = [await self.node() for _ in range(count)]
        for node in nodes[1:]:
            assert await node.bootstrap([address_of(nodes[0])]) == 1
        await eventually(lambda: all(len(node.contacts()) >= min(count - 1, 8) for node in nodes))
        return nodes

    def record(
        self, node: DhtNode, body: Body = METRICS, *, seq: int | None = None, ttl: float = 5.0
    ) -> bytes:
        """A new record of the node's owner."""
        seq = next(self._seq) if seq is None else seq
        return seal(self.identities[node], body, swarm=SWARM, seq=seq, ttl=ttl)

    async def publish(self, *nodes: DhtNode) -> None:
        for node in nodes:
            assert await node.put(KEY, self.record(node)) > 0

    async def read_by(self, node: DhtNode) -> set[str]:
        """The peer ids whose records a node reads."""
        return {record.peer_id for record in await node.read(KEY)}

    def ids(self, *nodes: DhtNode) -> set[str]:
        return {self.identities[node].peer_id for node in nodes}


class Stranger(asyncio.DatagramProtocol):
    """A UDP socket of somebody else. ``answer`` may reply to a datagram."""

    def __init__(self) -> None:
        self.received: asyncio.Queue[tuple[bytes, Address]] = asyncio.Queue()
        self.answer: Callable[[bytes], bytes | None] = lambda _: None
        self.id = os.urandom(20)
        self.token = bytes(8)
        self.asked: list[str] = []

    def connection_made(self, transport: Any) -> None:
        self.transport: asyncio.DatagramTransport = transport
        self.address: Address = transport.get_extra_info("sockname")

    def datagram_received(self, data: bytes, addr: Address) -> None:
        if data[0] == 0:
            self.asked.append(msgpack.unpackb(data[21:])[0])
            if (reply := self.answer(data)) is not None:
                self.transport.sendto(reply, addr)
        else:
            self.received.put_nowait((data, addr))

    def send(self, datagram: bytes, node: DhtNode) -> None:
        self.transport.sendto(datagram, address_of(node))

    async def ask(self, node: DhtNode, method: str, *arguments: object) -> tuple[bytes, bytes, Any]:
        """One request, written from the format's description alone; (request, reply, result)."""
        request = b"\0" + os.urandom(20) + msgpack.packb([method, self.token, self.id, *arguments])
        self.send(request, node)
        reply, _ = await asyncio.wait_for(self.received.get(), 5)
        sender, self.token, result = msgpack.unpackb(reply[21:])
        assert reply[:21] == b"\1" + request[1:21]
        assert len(sender) == 20
        return request, reply, result

    def reply_to(self, request: bytes, result: object) -> bytes:
        return b"\1" + request[1:21] + msgpack.packb([self.id, bytes(8), result])

    def polite(self, request: bytes) -> bytes:
        """The answer of a node that knows nothing and keeps nothing."""
        results: dict[str, object] = {"ping": True, "find_node": [], "rput": False, "rget": [0, False, []]}
        return self.reply_to(request, results[msgpack.unpackb(request[21:])[0]])


def address_of(node: DhtNode) -> Address:
    return "127.0.0.1", node.port


async def eventually(true: Callable[[], bool]) -> None:
    """Wait for what other nodes bring about; the deadline only bounds a failure."""
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.002)


async def drained(node: DhtNode, stranger: Stranger) -> None:
    """Wait until the node has worked off everything that the stranger has sent it so far."""
    await stranger.ask(node, "ping")
