"""A node of the DHT that is there to do harm: it gets into tables like any other, and then lies."""

from __future__ import annotations

import asyncio
import random
import struct
from collections import deque
from typing import Any, Final, Literal, get_args

import msgpack

from p2pllm.config import Address
from p2pllm.dht import DhtNode
from p2pllm.errors import RecordError
from p2pllm.identity import Identity
from p2pllm.records import Record, open_record

__all__ = ["VICES", "HostileNode", "Vice"]

Vice = Literal["withholds", "stale", "forges", "garbage"]
"""What it answers who reads: nothing, the oldest record of each peer that it ever got, records that their
owners never signed, or bytes without a meaning. All of them say to store what they do not, and send who looks
for nodes to others that are not there.
"""
VICES: Final[tuple[Vice, ...]] = get_args(Vice)

HOST: Final = "127.0.0.1"
TOKEN: Final = bytes(8)
NONCE_END: Final = 21
MAX_KEYS: Final = 64
LIFE_MS: Final = 5000
NEVER_PUBLISHED: Final = 10**6
"""So much higher than a true sequence number is a false one."""

NOISE_S: Final = 0.1
"""How often it sends somebody what he did not ask for."""

_DIGEST: Final = struct.Struct(">20sBQL")
_METRICS: Final = 1
"""The kind of record that digests are about."""


class HostileNode:
    """Proves its id honestly, and answers everything else by its ``vice``."""

    def __init__(self, identity: Identity, vice: Vice, rng: random.Random) -> None:
        self._vice = vice
        self._rng = rng
        self._id = identity.node_id
        self._dht = DhtNode(identity, rng=rng, wrap=self._wrap)
        self._oldest: dict[bytes, dict[tuple[str, str], Record]] = {}
        self._heard: deque[tuple[bytes, Address]] = deque(maxlen=32)
        self._transport: asyncio.DatagramTransport | None = None
        self._noise: asyncio.Task[None] | None = None

    @property
    def address(self) -> Address:
        """Where it listens."""
        return HOST, self._dht.port

    async def start(self, bootstrap: Address) -> None:
        """Get into the network."""
        await self._dht.start([HOST], 0)
        await self._dht.bootstrap([bootstrap])
        self._noise = asyncio.create_task(self._disturb())

    async def stop(self) -> None:
        """Be gone."""
        if self._noise is not None:
            self._noise.cancel()
            await asyncio.wait([self._noise])
        await self._dht.close()

    def _wrap(self, transport: asyncio.DatagramTransport) -> asyncio.DatagramTransport:
        self._transport = transport
        transport.set_protocol(_Ear(transport.get_protocol(), self))
        return transport

    def answers(self, data: bytes, address: Address) -> bool:
        """Whether it has answered a datagram itself; its honest half does not get that one."""
        self._heard.append((data, address))
        if self._transport is None or data[:1] != b"\0":
            return False
        try:
            method, _, _, *arguments = msgpack.unpackb(data[NONCE_END:])
            result = self._lie(method, *arguments)
        except (ValueError, TypeError, msgpack.UnpackException):
            return False
        if result is None:
            return False
        reply = msgpack.packb([self._id, TOKEN, result])
        self._transport.sendto(b"\1" + data[1:NONCE_END] + reply, address)
        return True

    def _lie(self, method: str, *arguments: Any) -> object:
        """What to reply, None to leave it to the honest half."""
        match method, arguments:
            case "find_node", [bytes(target), _]:
                return b"".join(self._nowhere(target) for _ in range(8))
            case "rput", [bytes(key), _, bytes(raw)]:
                self._remember(key, raw)
                return True
            case "rget", [bytes(key), int(since)]:
                return [since + 1, False, self._records(key)]
            case "digest", [bytes(key), int(since)]:
                return [since + 1, False, self._digests(key)]
            case "pick", [bytes(key), _]:
                return self._records(key)
        return None

    def _remember(self, key: bytes, raw: bytes) -> None:
        if len(self._oldest) >= MAX_KEYS and key not in self._oldest:
            return
        try:
            record = open_record(raw)
        except RecordError:
            return
        self._oldest.setdefault(key, {}).setdefault((record.peer_id, record.kind), record)

    def _nowhere(self, target: bytes) -> bytes:
        """A contact nearer to the target than any true one, on a port where nobody listens."""
        return (
            target[:10]
            + self._rng.randbytes(10)
            + bytes([127, 0, 0, 1])
            + self._rng.randint(1, 1023).to_bytes(2)
        )

    def _records(self, key: bytes) -> list[object]:
        kept = [record.raw for record in self._oldest.get(key, {}).values()][:3]
        match self._vice:
            case "withholds":
                return []
            case "stale":
                return [[LIFE_MS, raw] for raw in kept]
            case "forges":
                return [[LIFE_MS, self._changed(raw)] for raw in kept]
            case "garbage":
                return [[LIFE_MS, self._rng.randbytes(300)], [None, 7], "?"]

    def _digests(self, key: bytes) -> bytes:
        match self._vice:
            case "withholds":
                return b""
            case "garbage":
                return self._rng.randbytes(200)
        more = NEVER_PUBLISHED if self._vice == "forges" else 0
        return b"".join(
            _DIGEST.pack(bytes.fromhex(record.peer_id), _METRICS, record.seq + more, LIFE_MS)
            for record in list(self._oldest.get(key, {}).values())[:30]
            if record.kind == "metrics"
        )

    def _changed(self, raw: bytes) -> bytes:
        """The same with one byte different."""
        place = self._rng.randrange(len(raw))
        return raw[:place] + bytes([raw[place] ^ 1 << self._rng.randrange(8)]) + raw[place + 1 :]

    async def _disturb(self) -> None:
        """Send garbage, and what was received with a byte different, to whom it came from."""
        while True:
            await asyncio.sleep(NOISE_S * self._rng.uniform(0.5, 1.5))
            if self._heard and self._transport is not None:
                data, address = self._rng.choice(self._heard)
                self._transport.sendto(self._changed(data), address)
                self._transport.sendto(self._rng.randbytes(self._rng.randint(1, 1200)), address)


class _Ear(asyncio.DatagramProtocol):
    """Gives its node a chance to lie before the honest half answers."""

    def __init__(self, honest: Any, node: HostileNode) -> None:
        self._honest = honest
        self._node = node

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        if not self._node.answers(data, (addr[0], addr[1])):
            self._honest.datagram_received(data, addr)

    def error_received(self, exc: Exception) -> None:
        self._honest.error_received(exc)

    def connection_lost(self, exc: Exception | None) -> None:
        self._honest.connection_lost(exc)

    def pause_writing(self) -> None:
        self._honest.pause_writing()

    def resume_writing(self) -> None:
        self._honest.resume_writing()
