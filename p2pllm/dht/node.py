"""The DHT node: joins the network, publishes records near their key, reads those of others merged."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import random
import socket
import time
from collections.abc import Callable, Sequence
from typing import Final

import structlog
from kademlia.network import Server

from p2pllm.dht.lookup import Lookup, Replicas, find_nearest
from p2pllm.dht.mirror import Mirror
from p2pllm.dht.protocol import K, RegistryProtocol
from p2pllm.dht.storage import Records
from p2pllm.dht.table import distance
from p2pllm.dht.wire import ID_BYTES, Address, Contact
from p2pllm.errors import PortTakenError, UsageError
from p2pllm.identity import Identity
from p2pllm.records import Record, peek

__all__ = ["DhtNode"]

REPLICAS: Final = 8
"""Nodes that keep a record."""

READ_FROM: Final = 2
"""Replicas that a read merges, others each time: one alone could hide records for good."""

READ_DEADLINE_S: Final = 1.25
RESOLVE_DEADLINE_S: Final = 2.0
REFRESH_S: Final = 15.0
QUIET_S: Final = 30.0
MAX_PER_SOURCE: Final = 512

log = structlog.get_logger()

# The package and its RPC layer write a line for every datagram.
for _name in ("kademlia", "rpcudp"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)


class _Server(Server):  # type: ignore[misc]  # the package ships no types
    """The package's server with our protocol in it. It opens the socket; what else it offers is not used."""

    def __init__(
        self,
        node_id: bytes,
        storage: Records,
        clock: Callable[[], float],
        on_contact: Callable[[Contact], None],
    ) -> None:
        super().__init__(ksize=K, node_id=node_id, storage=storage)
        self._clock = clock
        self._on_contact = on_contact

    def _create_protocol(self) -> RegistryProtocol:
        return RegistryProtocol(self.node, self.storage, clock=self._clock, on_contact=self._on_contact)

    def refresh_table(self, interval: int = 3600) -> None:
        """Nothing: the node keeps its table fresh itself, and owners renew their own records."""


class DhtNode:
    """A node of the DHT.

    Its place in the network is the ``identity``'s peer id; ``clock`` gives seconds, ``rng`` jitter. Keys are
    20 bytes.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._id = identity.node_id
        self._clock = clock
        self._rng = rng or random.Random()
        self._records = Records(max_per_source=MAX_PER_SOURCE)
        self._replicas = Replicas(REPLICAS)
        self._server = _Server(self._id, self._records, clock, self._replicas.arrived)
        self._protocol: RegistryProtocol
        self._mirror: Mirror
        self._refreshing: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> None:
        """Listen on UDP ``host:port`` (IPv4; port 0 takes a free one). UsageError if that is impossible."""
        try:
            await self._server.listen(port, await _resolve(host))
        except OSError as error:
            cause = error.__cause__ if isinstance(error.__cause__, OSError) else error  # uvloop wraps it
            raise (PortTakenError if cause.errno == errno.EADDRINUSE else UsageError)(
                f"cannot listen on {host}:{port} (UDP), {cause.strerror}: choose another --host or --port"
            ) from error
        self._protocol = self._server.protocol
        self._mirror = Mirror(self._protocol, self._clock)
        self._refreshing = asyncio.create_task(self._keep_fresh())
        log.debug("dht_listening", host=host, port=self.port)

    @property
    def port(self) -> int:
        """The UDP port."""
        return int(self._server.transport.get_extra_info("sockname")[1])

    async def bootstrap(self, addresses: Sequence[Address]) -> int:
        """Join through known nodes, (host name or IP, port) each; how many of them answered.

        A dead address costs 1 s at most, a name that does not resolve 2 s; all are tried at once. UsageError
        if a port cannot be one.
        """
        answers = await asyncio.gather(*(self._knock(address) for address in addresses))
        answered = {contact.address for contact in answers if contact is not None and contact.id != self._id}
        if answered:
            await self._nearest(self._id)
        log.debug("dht_bootstrapped", answered=len(answered), contacts=len(self.contacts()))
        return len(answered)

    async def put(self, key: bytes, raw: bytes) -> int:
        """Publish a signed record under its key, in place of an older one; how many replicas hold it.

        This node keeps it too, and counts when it is one of the nearest. RecordError if the record is not
        valid.
        """
        header = peek(raw)
        kept = self._records.accept(key, raw, header.ttl, source="", now=self._clock())
        replicas = await self._replicas_of(key)
        stored = await asyncio.gather(
            *(self._protocol.store(replica, key, raw, header.ttl) for replica in replicas)
        )
        if None in stored:
            self._replicas.forget(key)
        return stored.count(True) + (kept and self._is_near(key, replicas))

    async def read(self, key: bytes) -> list[Record]:
        """The newest live record of each (peer, kind) under ``key``, from several replicas and from here."""
        replicas = await self._replicas_of(key)
        waiting = iter(self._rng.sample(replicas, len(replicas)))

        async def read_one() -> None:
            for replica in waiting:  # shared by the readers: who meets a dead replica takes the next
                if await self._mirror.refresh(key, replica):
                    return
                self._replicas.forget(key)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READ_DEADLINE_S), asyncio.TaskGroup() as readers:
                for _ in range(READ_FROM):
                    readers.create_task(read_one())
        newest: dict[tuple[str, str], Record] = {}
        for record in [*self._records.live(key, self._clock()), *self._mirror.live(key)]:
            slot = record.peer_id, record.kind
            if slot not in newest or newest[slot].seq < record.seq:
                newest[slot] = record
        return list(newest.values())

    def contacts(self) -> list[tuple[bytes, str, int]]:
        """The nodes known and not silent, as (id, host, port), nearest first."""
        router = self._protocol.router
        return [(contact.id, *contact.address) for contact in router.nearest(self._id, len(router))]

    async def close(self) -> None:
        """Stop. Nothing of the node runs or listens afterwards."""
        refreshing, self._refreshing = self._refreshing, None
        if refreshing is None:
            return
        refreshing.cancel()
        await asyncio.wait([refreshing])
        await self._protocol.close()
        if not refreshing.cancelled():
            refreshing.result()

    async def _knock(self, address: Address) -> Contact | None:
        name, port = address
        if not 1 <= port <= 65535:
            raise UsageError(f"{name}:{port} is not an address: a port is a number from 1 to 65535")
        try:
            async with asyncio.timeout(RESOLVE_DEADLINE_S):
                host = await _resolve(name)
        except (OSError, UnicodeError):  # a TimeoutError is an OSError too
            return None
        return await self._protocol.ping((host, port))

    async def _replicas_of(self, key: bytes) -> list[Contact]:
        replicas = self._replicas.get(key, self._clock())
        if replicas is None:
            replicas = await self._nearest(key)
            # Fewer than we know of: some are silent just now, and may be back in a moment.
            if len(replicas) >= min(REPLICAS, len(self._protocol.router)):
                self._replicas.found(key, replicas, self._clock())
        return replicas

    async def _nearest(self, target: bytes) -> list[Contact]:
        lookup = Lookup(target, REPLICAS, self._protocol.router.nearest(target, K))
        return await find_nearest(lookup, lambda contact: self._protocol.find_node(contact, target))

    def _is_near(self, key: bytes, replicas: Sequence[Contact]) -> bool:
        own = Contact(self._id, "", 0)
        return len(replicas) < REPLICAS or distance(own, key) < distance(replicas[-1], key)

    async def _keep_fresh(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S * self._rng.uniform(0.75, 1.25))
            await self._refresh()

    async def _refresh(self) -> None:
        """Look for neighbours and for strangers, and ping who has been quiet for long."""
        await self._nearest(self._id)
        await self._nearest(self._rng.randbytes(ID_BYTES))
        heard, now = self._protocol.liveness.heard, self._clock()
        quiet = [contact for contact in self._protocol.router if heard(contact.address) < now - QUIET_S]
        await asyncio.gather(*(self._protocol.ping(contact.address) for contact in quiet[:K]))


async def _resolve(host: str) -> str:
    """The first IPv4 address of a host, asked of the system off the loop."""
    found = await asyncio.get_running_loop().getaddrinfo(
        host, None, family=socket.AF_INET, type=socket.SOCK_DGRAM
    )
    return str(found[0][4][0])
