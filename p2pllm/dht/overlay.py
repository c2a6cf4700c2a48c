"""The network of one address family: a socket, the contacts met through it, and where keys lie among them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Callable, Sequence
from typing import Final
from weakref import WeakValueDictionary

from p2pllm.dht.answers import K
from p2pllm.dht.contacts import ID_BYTES, Address, Contact, Family
from p2pllm.dht.exchange import Wrap
from p2pllm.dht.lookup import PATIENCE_S, Lookup, Replicas, find_nearest
from p2pllm.dht.protocol import RegistryProtocol
from p2pllm.dht.storage import Records
from p2pllm.dht.table import distance
from p2pllm.identity import Identity

__all__ = ["REPLICAS", "Overlay"]

REPLICAS: Final = 8
"""Nodes that keep a record."""

FIRST_REFRESH_S: Final = 1.0
REFRESH_S: Final = 20.0
QUIET_S: Final = 30.0


class Overlay:
    """A node's part in the network of one ``family``, over a storage that several may share."""

    def __init__(
        self,
        family: Family,
        identity: Identity,
        storage: Records,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        wrap: Wrap | None,
    ) -> None:
        self.family = family
        self._id = identity.node_id
        self._clock = clock
        self._rng = rng
        self._replicas = Replicas(REPLICAS)
        self.protocol = RegistryProtocol(
            identity, storage, clock=clock, on_contact=self._replicas.arrived, wrap=wrap
        )
        self._looking = WeakValueDictionary[bytes, asyncio.Lock]()
        # How long what was found out about the network is taken to be true: long, once it changes little.
        self._interval = REFRESH_S
        self._joined = asyncio.Event()
        self._refreshing: asyncio.Task[None] | None = None

    async def open(self, bound: socket.socket) -> None:
        """Listen on a bound socket, which belongs to the overlay from now on."""
        await asyncio.get_running_loop().create_datagram_endpoint(lambda: self.protocol, sock=bound)
        self._refreshing = asyncio.create_task(self._keep_fresh())

    async def join(self, addresses: Sequence[Address]) -> set[bytes]:
        """Meet the nodes at these addresses, and through them one's neighbours; the ids of who answered."""
        met = await asyncio.gather(*map(self.protocol.hello, addresses))
        answered = {contact.id for contact in met if contact is not None and contact.id != self._id}
        if answered:
            self._interval = FIRST_REFRESH_S
            self._joined.set()
            await self._nearest(self._id, K)
        return answered

    def contacts(self) -> list[Contact]:
        """The nodes known and not silent, nearest first."""
        router = self.protocol.router
        return router.nearest(self._id, len(router))

    async def replicas_of(self, key: bytes) -> list[Contact]:
        """The nodes that keep what lies under a key, nearest first; looked up if that was long ago."""
        async with self._looking.setdefault(key, asyncio.Lock()):  # who comes second finds it done
            replicas = self._replicas.get(key, self._clock())
            if replicas is None:
                replicas = await self._nearest(key, REPLICAS)
                # Fewer than we know of: some are silent just now, and may be back in a moment.
                complete = len(replicas) >= min(REPLICAS, len(self.protocol.router))
                good_for = self._interval if complete else PATIENCE_S
                self._replicas.found(key, replicas, self._clock(), good_for)
        return replicas

    def failed(self, key: bytes, replica: Contact) -> None:
        """One of the key's replicas did not answer."""
        self._replicas.failed(key, replica, self._clock())

    def is_near(self, key: bytes, replicas: Sequence[Contact]) -> bool:
        """Whether this node, beside the ``replicas`` found, is itself one of the key's."""
        own = Contact(self._id, "", 0)
        return len(replicas) < REPLICAS or distance(own, key) < distance(replicas[-1], key)

    def stop(self) -> None:
        """Listen no more, and have what runs here end."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            self.protocol.stop()

    async def close(self) -> None:
        """Stop. Nothing of the overlay runs or listens afterwards."""
        self.stop()
        if self._refreshing is not None:
            await asyncio.wait([self._refreshing])
            await self.protocol.close()
            if not self._refreshing.cancelled():
                self._refreshing.result()

    async def _nearest(self, target: bytes, wanted: int) -> list[Contact]:
        known = self.protocol.router.nearest(target, K)
        lookup = Lookup(target, REPLICAS, known, self.protocol.is_fresh)
        return await find_nearest(lookup, lambda contact: self.protocol.find_node(contact, target, wanted))

    async def _keep_fresh(self) -> None:
        """Refresh often after joining, and for as long as that changes much: a network that has just started,
        or restarted, settles within seconds.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval * self._rng.uniform(0.75, 1.25)):
                    await self._joined.wait()
                    self._joined.clear()
                    continue
            before = set(self.contacts())
            await self.refresh()
            after = set(self.contacts())
            if not after:
                self._interval = FIRST_REFRESH_S
            elif len(before ^ after) > len(before) / 4:
                self._replicas.clear()
            else:
                self._interval = min(2 * self._interval, REFRESH_S)

    async def refresh(self) -> None:
        """Look for neighbours and for strangers, and ping who has been quiet for long or did not answer."""
        await self._nearest(self._id, K)
        await self._nearest(self._rng.randbytes(ID_BYTES), K)
        router, heard, now = self.protocol.router, self.protocol.liveness.heard, self._clock()
        quiet = [
            contact
            for contact in router
            if heard(contact.address) < now - QUIET_S or not self.protocol.is_usable(contact)
        ]
        await asyncio.gather(*(self.protocol.ping(contact.address) for contact in quiet[:K]))
