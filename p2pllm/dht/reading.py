"""Reading keys: what is new from one replica, checked against the digests of another.

One replica alone could hide records, or just have missed them. What the second shows to be missing is picked
from it. For a key that this node itself is a replica of, its own storage stands for the first, once it holds
anything: it may have come just now.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final, TypeAlias, TypeVar

from p2pllm.dht.contacts import Contact
from p2pllm.dht.mirror import Listing, Mirror
from p2pllm.dht.overlay import Overlay
from p2pllm.dht.pages import Digest, Slot
from p2pllm.dht.protocol import RegistryProtocol
from p2pllm.dht.storage import Held

__all__ = ["Reader", "Rota"]

DEADLINE_S: Final = 1.25
TURNS: Final = 3

_MAX_KEYS = 2048

T = TypeVar("T")
_Step: TypeAlias = Callable[[RegistryProtocol, bytes, Contact], Awaitable[T]]


class Rota:
    """In which order to turn to the replicas of a key.

    The first two stay for three turns: coming back to the same ones, there is little new to hear. Then the
    second, who has been followed all along, becomes the first, and the second is somebody else.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._turns: OrderedDict[bytes, tuple[int, list[bytes]]] = OrderedDict()

    def order(self, key: bytes, replicas: Sequence[Contact]) -> list[Contact]:
        """All of the replicas: the two whose turn it is, then the others in any order."""
        left, ids = self._turns.pop(key, (TURNS, []))
        ids = ids if left else ids[1:]
        turn = [contact for node_id in ids for contact in replicas if contact.id == node_id]
        others = [contact for contact in replicas if contact not in turn]
        order = turn + self._rng.sample(others, len(others))
        self._turns[key] = (left or TURNS) - 1, [contact.id for contact in order[:2]]
        if len(self._turns) > _MAX_KEYS:
            self._turns.popitem(last=False)
        return order


class Reader:
    """Reads keys through the ``overlays`` into the ``mirror``."""

    def __init__(self, overlays: Sequence[Overlay], mirror: Mirror, rng: random.Random) -> None:
        self._mirror = mirror
        self._overlays = [(overlay, Rota(rng), Rota(rng)) for overlay in overlays]

    async def read(self, key: bytes) -> list[Held]:
        """The newest live record of each (peer, kind) under ``key``."""
        found = await self._replicas_of(key)
        has_first = self._mirror.stores(key) and any(
            overlay.is_near(key, replicas)
            for (overlay, *_), replicas in zip(self._overlays, found, strict=True)
        )
        listings: list[tuple[Overlay, asyncio.Task[Listing | None]]] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DEADLINE_S):
                async with asyncio.TaskGroup() as readers:
                    for (overlay, rota, _), replicas in zip(self._overlays, found, strict=True):
                        order = iter(rota.order(key, replicas))
                        if replicas and not has_first:
                            has_first = True
                            readers.create_task(_first(overlay, key, order, self._mirror.refresh))
                        listing = _first(overlay, key, order, self._mirror.list)
                        listings.append((overlay, readers.create_task(listing)))
                for overlay, task in listings:
                    if (new := task.result()) is not None:
                        await self._mirror.complete(overlay.protocol, key, new)
        return self._mirror.held(key)

    async def glance(self, key: bytes) -> list[Digest]:
        """Digests of what is new under ``key`` at one replica, and of all that is stored here."""
        found = await self._replicas_of(key)
        newest: dict[Slot, Digest] = {digest.slot: digest for digest in self._mirror.stored(key)}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DEADLINE_S):
                for (overlay, _, rota), replicas in zip(self._overlays, found, strict=True):
                    order = iter(rota.order(key, replicas))
                    listing = await _first(overlay, key, order, self._mirror.glance)
                    for digest in listing.digests if listing else ():
                        if digest.slot not in newest or newest[digest.slot].seq < digest.seq:
                            newest[digest.slot] = digest
        return list(newest.values())

    async def _replicas_of(self, key: bytes) -> list[list[Contact]]:
        return [await overlay.replicas_of(key) for overlay, *_ in self._overlays]


async def _first(overlay: Overlay, key: bytes, order: Iterator[Contact], step: _Step[T]) -> T | None:
    """What ``step`` gets from the first replica from which it gets anything. ``order`` may be shared."""
    for replica in order:
        if result := await step(overlay.protocol, key, replica):
            return result
        overlay.failed(key, replica)
    return None
