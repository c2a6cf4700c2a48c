"""The DHT node: joins the network, publishes records near their key, reads those of others merged."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from ipaddress import ip_address
from typing import Final

import structlog

from p2pllm.dht.contacts import Address, Contact, family_of, is_usable
from p2pllm.dht.exchange import Wrap
from p2pllm.dht.mirror import Mirror
from p2pllm.dht.overlay import Overlay
from p2pllm.dht.pages import Digest
from p2pllm.dht.reading import Reader
from p2pllm.dht.sockets import bind, resolve
from p2pllm.dht.storage import Held, Records
from p2pllm.errors import UsageError
from p2pllm.identity import Identity
from p2pllm.records import Record, open_record, peek

__all__ = ["DhtNode"]

RESOLVE_DEADLINE_S: Final = 2.0
PUT_DEADLINE_S: Final = 1.25
MAX_PER_SOURCE: Final = 512
MAX_GOOD: Final = 64

_MAX_OPENED = 2048
_MAX_ADDRESSES_OF_NAME = 8
_MAX_ADDRESSES_OF_PEER = 8

log = structlog.get_logger()

# The package and its RPC layer write a line for every datagram.
for _name in ("kademlia", "rpcudp"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)


class DhtNode:
    """A node of the DHT.

    Its place in the network is the ``identity``'s peer id; ``clock`` gives seconds, ``rng`` jitter, and
    ``wrap`` may put something between the node and its sockets. Keys are 20 bytes. ``open`` checks a record
    like `open_record`, but not one that this node has seen before.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        wrap: Wrap | None = None,
    ) -> None:
        self._identity = identity
        self._clock = clock
        self._rng = rng or random.Random()
        self._wrap = wrap
        self.open: Callable[[bytes], Record] = lru_cache(_MAX_OPENED)(open_record)
        self._records = Records(max_per_source=MAX_PER_SOURCE, open_checked=self.open)
        self._mirror = Mirror(self._records, clock=clock, open_checked=self.open)
        self._overlays: list[Overlay] = []
        self._reader = Reader((), self._mirror, self._rng)
        self.port = 0

    async def start(self, hosts: Sequence[str], port: int) -> None:
        """Listen on UDP on ``port`` of at most one IPv4 and one IPv6 host; port 0 takes a free one.

        The host ``::`` is left out where the machine has no IPv6. UsageError if that is impossible,
        PortTakenError if another process has the port.
        """
        bound = await bind(hosts, port)
        waiting = list(bound.items())
        try:
            while waiting:
                family, one = waiting.pop(0)
                self.port = one.getsockname()[1]
                overlay = Overlay(
                    family, self._identity, self._records, clock=self._clock, rng=self._rng, wrap=self._wrap
                )
                await overlay.open(one)
                self._overlays.append(overlay)
        finally:
            for _, one in waiting:
                one.close()
        self._reader = Reader(self._overlays, self._mirror, self._rng)
        log.debug("dht_listening", hosts=hosts, port=self.port, families=[one.name for one in bound])

    async def bootstrap(self, addresses: Sequence[Address]) -> int:
        """Join through known nodes, (host name or IP, port) each; how many of them answered.

        Of a name every address is tried, in both families. A dead address costs 1 s at most, a name that does
        not resolve 2 s; all are tried at once. UsageError if a port cannot be one.
        """
        for name, port in addresses:
            if not 1 <= port <= 65535:
                raise UsageError(f"{name}:{port} is not an address: a port is a number from 1 to 65535")
        answered = await asyncio.gather(*(self._join(overlay, addresses) for overlay in self._overlays))
        ids = set[bytes]().union(*answered)
        log.debug("dht_bootstrapped", answered=len(ids), contacts=len(self.contacts()))
        return len(ids)

    async def put(self, key: bytes, raw: bytes) -> int:
        """Publish a signed record under its key, in place of an older one; how many nodes hold it.

        This node keeps it too, and counts when it is one of the nearest; those that have not answered soon do
        not, so that none of them can hold up the owner. RecordError if the record is not valid.
        """
        header = peek(raw)
        kept = self._records.accept(key, raw, header.ttl, source="", now=self._clock())
        overlays = self._overlays  # `close` may come in between
        found = [await overlay.replicas_of(key) for overlay in overlays]
        targets: dict[bytes, tuple[Overlay, Contact]] = {}  # a node of both families needs it once
        near = False
        for overlay, replicas in zip(overlays, found, strict=True):
            near = near or overlay.is_near(key, replicas)
            for replica in replicas:
                targets.setdefault(replica.id, (overlay, replica))

        stored: dict[Contact, bool] = {}

        async def store(overlay: Overlay, replica: Contact) -> None:
            answer = None
            try:
                answer = await overlay.protocol.store(replica, key, raw, header.ttl)
            finally:
                if answer is None:
                    overlay.failed(key, replica)
            stored[replica] = answer is True

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PUT_DEADLINE_S), asyncio.TaskGroup() as storing:
                for target in targets.values():
                    storing.create_task(store(*target))
        return sum(stored.values()) + (kept and near)

    async def read(self, key: bytes) -> list[Held]:
        """The newest live record of each (peer, kind) under ``key``, with the life it has left.

        Takes what is new from one replica and compares it with another, others every few times.
        """
        return await self._reader.read(key)

    async def glance(self, key: bytes) -> list[Digest]:
        """Which records are new under ``key``, as one replica says, and which this node stores itself.

        Much cheaper than reading them; unsigned, so only good for what a lie cannot harm.
        """
        return await self._reader.glance(key)

    def contacts(self) -> list[Contact]:
        """The nodes known and not silent, nearest first, those of IPv4 before those of IPv6."""
        return [contact for overlay in self._overlays for contact in overlay.contacts()]

    def good(self) -> list[Address]:
        """Addresses that have answered lately, the latest first: the best to join again through. At most
        64.
        """
        heard = [
            (overlay.protocol.liveness.heard(contact.address), contact.address)
            for overlay in self._overlays
            for contact in overlay.contacts()
        ]
        return [address for _, address in sorted(heard, reverse=True)[:MAX_GOOD]]

    def moved(self, node_id: bytes, addresses: Sequence[Address]) -> None:
        """A fresh signed record says where a node (20-byte id) is now.

        If we know it elsewhere, or know hardly anybody, we go and see: once it has proved to be there, that
        is where it is. Hosts that are names are passed over.
        """
        numeric = [
            (str(ip_address(host)), port)  # as the system writes it in what it receives
            for host, port in addresses[:_MAX_ADDRESSES_OF_PEER]
            if is_usable(host) and port
        ]
        for overlay in self._overlays:
            if own := [address for address in numeric if family_of(address[0]) == overlay.family]:
                overlay.protocol.moved(node_id, own)

    async def close(self) -> None:
        """Stop. Nothing of the node runs or listens afterwards."""
        self._reader = Reader((), self._mirror, self._rng)
        for overlay in self._overlays:
            overlay.stop()  # at once: whoever does not wait for the rest leaves nothing behind either
        await asyncio.gather(*(overlay.close() for overlay in self._overlays))
        self._overlays = []

    async def _join(self, overlay: Overlay, addresses: Sequence[Address]) -> set[bytes]:
        found = await asyncio.gather(*(_resolve(name, overlay) for name, _ in addresses))
        numeric = [
            (host, port)
            for hosts, (_, port) in zip(found, addresses, strict=True)
            for host in hosts[:_MAX_ADDRESSES_OF_NAME]
        ]
        return await overlay.join(list(dict.fromkeys(numeric)))


async def _resolve(name: str, overlay: Overlay) -> list[str]:
    try:
        async with asyncio.timeout(RESOLVE_DEADLINE_S):
            return await resolve(name, overlay.family)
    except TimeoutError:
        return []
