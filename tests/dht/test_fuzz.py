"""A live node under a rain of mutated datagrams: questions, and answers to its own questions.

Nothing reaches the loop, nothing grows, and whoever is honest is served all the while.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from typing import Any

import msgpack
import psutil
import pytest
from support.bodies import METRICS, PEER, SWARM
from support.dht import KEY, Address, Network, Stranger, address_of, method_of, protocol_of

from p2pllm.identity import Identity
from p2pllm.records import ClaimBody, leader_key, seal

BATCH = 250
SETTLED = 0.2
"""Part of the rounds after which memory is taken to be as large as it gets."""

MAX_GROWTH = 24 * 2**20

ODD_VALUES: tuple[object, ...] = (
    None,
    True,
    -1,
    0,
    2**63,
    2**64 - 1,
    -(2**63),
    1.5,
    float("nan"),
    float("inf"),
    "",
    "ping",
    "\0",
    b"",
    bytes(20),
    b"\xff" * 20,
    bytes(1200),
    [],
    [[]],
    {},
    [None] * 64,
    msgpack.Timestamp(0),
)


def mutate(rng: random.Random, datagram: bytes) -> bytes:
    """Another value in place of one, or bytes flipped, cut, repeated or inserted. The frame's head stays."""
    head, body = datagram[:21], bytearray(datagram[21:])
    if rng.random() < 0.4:
        fields = msgpack.unpackb(bytes(body))
        place: Any = fields
        while isinstance(inner := rng.choice(place), list) and inner and rng.random() < 0.7:
            place = inner
        place[rng.randrange(len(place))] = rng.choice(ODD_VALUES)
        return head + msgpack.packb(fields)
    for _ in range(rng.randint(1, 3)):
        at, size = rng.randrange(len(body) + 1), rng.randint(1, 8)
        match rng.randrange(5):
            case 0 if at < len(body):
                body[at] ^= 1 << rng.randrange(8)
            case 1:
                del body[at : at + size]
            case 2:
                body[at:at] = body[at : at + size] * rng.randint(1, 60)
            case 3:
                body[at:at] = rng.randbytes(size)
            case _:
                body[at : at + size] = rng.choice(
                    (b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xdf" * 4, b"\xc7\xff")
                )
    if rng.random() < 0.05:
        head = rng.randbytes(1) + head[1 : rng.randint(1, 21)]
    return (head + bytes(body))[:2000]


class Fuzzer(Stranger):
    """Answers each question ten times over with mutations of a good answer, and then with that."""

    rng: random.Random
    records: list[bytes]
    sent = 0

    def datagram_received(self, data: bytes, addr: Address) -> None:
        if data[0] != 0:
            return
        answer = self.good_answer(data)
        for _ in range(10):
            self.transport.sendto(mutate(self.rng, answer), addr)
            self.sent += 1
        self.transport.sendto(answer, addr)

    def good_answer(self, request: bytes) -> bytes:
        results: dict[str, object] = {
            "find_node": (self.id + bytes([127, 0, 0, 1]) + self.address[1].to_bytes(2)) * 3,
            "rget": [9, False, [[5000, raw] for raw in self.records[:3]]],
            "digest": [9, False, b"".join(os.urandom(20) + bytes([1]) + bytes(12) for _ in range(3))],
            "pick": [[5000, raw] for raw in self.records[:2]],
        }
        method = method_of(request)
        return self.reply_to(request, results[method]) if method in results else self.polite(request)

    def seeds(self) -> list[bytes]:
        """Every kind of good request, and an answer to nobody's question."""
        raw = self.rng.choice(self.records)
        return [
            self.request("ping"),
            self.request("hello", bytes(96)),
            self.request("find_node", KEY, 20),
            self.request("rget", KEY, 0),
            self.request("digest", KEY, 0),
            self.request("pick", KEY, (self.id + b"\1") * 5),
            *(self.request("rput", KEY, 5000, raw) for raw in self.records),
            self.request("rput", leader_key(SWARM), 3000, self.records[-1]),
            self.reply_to(self.request("rget", KEY, 0), [1, False, [[5000, raw]]]),
        ]


@pytest.mark.parametrize("count", [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
async def test_a_rain_of_mutated_datagrams(
    network: Network, stranger: Stranger, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    errors: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    caplog.set_level(logging.WARNING)
    rng = random.Random(20261130)
    node, other = await network.joined(2)
    transport, fuzzer = await loop.create_datagram_endpoint(Fuzzer, local_addr=("127.0.0.1", 0))
    fuzzer.rng = rng
    fuzzer.records = []
    process, settled_rss, rounds = psutil.Process(), 0, 0
    try:
        while fuzzer.sent < count:
            # So long that nobody runs into the rate limits: what is behind them is what should be met.
            network.clock.now += BATCH * 26 / 500
            if rounds % 20 == 0:
                owner, seq = Identity.from_seed(rng.randbytes(32)), rounds + 1
                fuzzer.records = [
                    seal(owner, body, swarm=SWARM, seq=seq, ttl=60.0) for body in (PEER, METRICS)
                ]
                fuzzer.records.append(seal(owner, ClaimBody(1, 0), swarm=SWARM, seq=seq, ttl=60.0))
                fuzzer.token = protocol_of(node)._token(fuzzer.address)
                await node.bootstrap([fuzzer.address])
            seeds = fuzzer.seeds()
            for _ in range(BATCH):
                fuzzer.send(mutate(rng, rng.choice(seeds)), node)
            fuzzer.sent += BATCH
            await stranger.ask(node, "find_node", KEY, 20)
            assert (await stranger.ask(node, "ping"))[2] is True
            if rounds % 4 == 0:
                await network.publish(other)
                await node.glance(KEY)
                assert await network.read_by(node) >= network.ids(other)
            rounds += 1
            if fuzzer.sent < count * SETTLED:
                settled_rss = process.memory_info().rss
    finally:
        transport.abort()
    assert process.memory_info().rss - settled_rss < MAX_GROWTH
    assert errors == []
    assert [line for line in caplog.records if line.name == "asyncio"] == []
    network.clock.now += 65.0
    await network.publish(node, other)
    for one in (node, other):
        assert await network.read_by(one) >= network.ids(node, other)
    assert address_of(other) in node.good()
