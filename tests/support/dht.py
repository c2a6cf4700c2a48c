"""Nodes on loopback, with a clock that only tests move, and a socket that sends what it likes."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import Callable
from typing import Any

import msgpack

from p2pllm.dht import DhtNode, Wrap
from p2pllm.dht.protocol import RegistryProtocol
from p2pllm.identity import Identity
from p2pllm.records import Body, directory_key, seal
from support.bodies import METRICS, SWARM

KEY = directory_key(SWARM, bytes(20), 0)
Address = tuple[str, int]


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Network:
    """Nodes that share one clock, and the identities behind them, the same in each run."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.identities: dict[DhtNode, Identity] = {}
        self._seq = itertools.count(1)
        self._number = itertools.count()

    async def node(self, identity: Identity | None = None, *hosts: str, wrap: Wrap | None = None) -> DhtNode:
        """A node that listens (on 127.0.0.1 if nothing is said) and knows nobody."""
        number = next(self._number)
        identity = identity or Identity.from_seed(number.to_bytes(32))
        node = DhtNode(identity, clock=self.clock, rng=random.Random(number), wrap=wrap)
        self.identities[node] = identity
        await node.start(hosts or ("127.0.0.1",), 0)
        return node

    async def joined(self, count: int, *, wrap: Wrap | None = None) -> list[DhtNode]:
        """Nodes of which each knows at least 8 of the others, or all."""
        nodes = [await self.node(wrap=wrap) for _ in range(count)]
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
        return {held.record.peer_id for held in await node.read(KEY)}

    async def still_works(self, *nodes: DhtNode) -> None:
        """All of them publish, and all read all."""
        await self.publish(*nodes)
        for node in nodes:
            assert await self.read_by(node) >= self.ids(*nodes)

    def ids(self, *nodes: DhtNode) -> set[str]:
        return {self.identities[node].peer_id for node in nodes}


class Stranger(asyncio.DatagramProtocol):
    """A UDP socket of somebody else, who has an identity. ``answer`` may reply to a datagram."""

    def __init__(self) -> None:
        self.received: asyncio.Queue[tuple[bytes, Address]] = asyncio.Queue()
        self.answer: Callable[[bytes], bytes | None] = lambda _: None
        self.identity = Identity.generate()
        self.id = self.identity.node_id
        self.token = bytes(8)
        self.asked: list[str] = []

    def connection_made(self, transport: Any) -> None:
        self.transport: asyncio.DatagramTransport = transport
        self.address: Address = transport.get_extra_info("sockname")[:2]

    def datagram_received(self, data: bytes, addr: Address) -> None:
        if data[0] == 0:
            self.asked.append(method_of(data))
            if (reply := self.answer(data)) is not None:
                self.transport.sendto(reply, addr)
        else:
            self.received.put_nowait((data, addr))

    def request(self, method: str, *arguments: object) -> bytes:
        """A request, written from the format's description alone."""
        return b"\0" + os.urandom(20) + msgpack.packb([method, self.token, self.id, *arguments])

    def send(self, datagram: bytes, node: DhtNode) -> None:
        self.transport.sendto(datagram, address_of(node))

    async def ask(self, node: DhtNode, method: str, *arguments: object) -> tuple[bytes, bytes, Any]:
        """One request to a node; (request, reply, result)."""
        request = self.request(method, *arguments)
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
        method, _, asker, *_ = msgpack.unpackb(request[21:])
        if method == "hello":
            signed = b"p2pllm node\0" + request[1:21] + asker + self.id
            return self.reply_to(request, [self.identity.public_key, self.identity.sign(signed)])
        results: dict[str, object] = {
            "ping": True,
            "find_node": b"",
            "rput": False,
            "rget": [0, False, []],
            "digest": [0, False, b""],
            "pick": [],
        }
        return self.reply_to(request, results[method])

    def polite_but(self, method: str, result: object) -> Callable[[bytes], bytes]:
        """As ``polite``, but for one method."""
        return lambda request: (
            self.reply_to(request, result) if method_of(request) == method else self.polite(request)
        )


def method_of(request: bytes) -> str:
    return str(msgpack.unpackb(request[21:])[0])


def protocol_of(node: DhtNode) -> RegistryProtocol:
    """The node's protocol of its first family."""
    return node._overlays[0].protocol


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
