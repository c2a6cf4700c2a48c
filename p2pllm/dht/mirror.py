"""What this node has read of other nodes' records, kept up to date by reading only what is new."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

from p2pllm.dht.answers import MAX_PICKED
from p2pllm.dht.contacts import Address, Contact
from p2pllm.dht.pages import Digest, Part
from p2pllm.dht.protocol import RegistryProtocol
from p2pllm.dht.storage import ForgedRecordError, Held, Records
from p2pllm.errors import RecordError
from p2pllm.records import Record

__all__ = ["Listing", "Mirror"]

MAX_PAGES: Final = 256
"""Pages read from one node at a time."""

MAX_RECORDS: Final = 32_768
MAX_PER_KEY: Final = 4096
MAX_PER_REPLICA: Final = 512

_MAX_PLACES = 8192

T = TypeVar("T")


class _Cursor(NamedTuple):
    """How far a replica has been read: the instance of the node, and its version."""

    instance: bytes = b""
    version: int = 0


@dataclass(frozen=True, slots=True)
class Listing:
    """What a replica says to hold that is new since we last looked there."""

    replica: Contact
    digests: list[Digest]
    cursor: _Cursor


class _Cursors:
    """How far each replica of each key has been read."""

    def __init__(self) -> None:
        self._places: OrderedDict[tuple[bytes, Address], _Cursor] = OrderedDict()

    def get(self, key: bytes, replica: Contact) -> _Cursor:
        return self._places.get((key, replica.address), _Cursor())

    def put(self, key: bytes, replica: Contact, cursor: _Cursor) -> None:
        place = key, replica.address
        self._places[place] = cursor
        self._places.move_to_end(place)
        if len(self._places) > _MAX_PLACES:
            self._places.popitem(last=False)


class Mirror:
    """Copies of the records under the keys that this node reads, beside its own ``storage``.

    Kept apart from what others store here, so that no replica can use up their room. Whether a record came as
    one of a page, or was picked because a digest named it, each replica has one cursor: up to there we have
    all that it has.
    """

    def __init__(
        self, storage: Records, *, clock: Callable[[], float], open_checked: Callable[[bytes], Record]
    ) -> None:
        self._storage = storage
        self._clock = clock
        self._copies = Records(
            max_records=MAX_RECORDS,
            max_per_key=MAX_PER_KEY,
            max_per_source=MAX_PER_REPLICA,
            open_checked=open_checked,
        )
        self._read = _Cursors()
        self._glanced = _Cursors()

    def held(self, key: bytes) -> list[Held]:
        """The newest live record of each (peer, kind) under ``key``, stored or copied."""
        now = self._clock()
        newest: dict[tuple[str, str], Held] = {}
        for held in [*self._storage.live(key, now), *self._copies.live(key, now)]:
            slot = held.record.peer_id, held.record.kind
            if slot not in newest or newest[slot].record.seq < held.record.seq:
                newest[slot] = held
        return list(newest.values())

    def stores(self, key: bytes) -> bool:
        """Whether this node itself stores anything under ``key``."""
        return bool(self._storage.live(key, self._clock()))

    def stored(self, key: bytes) -> list[Digest]:
        """Digests of what this node stores for others, and has published itself."""
        return [Digest.of(held) for held in self._storage.live(key, self._clock())]

    async def refresh(self, protocol: RegistryProtocol, key: bytes, replica: Contact) -> bool:
        """Copy what is new under ``key`` at one replica; whether it answered, honestly, to the end.

        Records that are not valid are left out. Pages read before a failure or cancellation are kept, and the
        next refresh goes on from there.
        """

        def take(items: list[tuple[bytes, float]], cursor: _Cursor) -> bool:
            self._read.put(key, replica, cursor)
            return self._copy(key, replica, items)

        async def ask(since: int) -> Part[tuple[bytes, float]] | None:
            return await protocol.fetch(replica, key, since)

        return await _walk(self._read.get(key, replica), ask, take) is not None

    async def list(self, protocol: RegistryProtocol, key: bytes, replica: Contact) -> Listing | None:
        """Digests of what is new under ``key`` at one replica, for ``complete``; None for no answer."""
        return await self._list(protocol, key, replica, self._read.get(key, replica))

    async def glance(self, protocol: RegistryProtocol, key: bytes, replica: Contact) -> Listing | None:
        """Digests of what is new under ``key`` at one replica since the last glance or copy there."""
        since = max(
            self._read.get(key, replica), self._glanced.get(key, replica), key=lambda place: place.version
        )
        listing = await self._list(protocol, key, replica, since)
        if listing is not None:
            self._glanced.put(key, replica, listing.cursor)
        return listing

    async def complete(self, protocol: RegistryProtocol, key: bytes, listing: Listing) -> None:
        """Copy from the listing's replica the records that only it has, or in a newer version."""
        missing = listing.digests
        while missing := [digest for digest in missing if digest.seq > self._newest(key, digest)]:
            batch, rest = missing[:MAX_PICKED], missing[MAX_PICKED:]
            items = await protocol.pick(listing.replica, key, [digest.slot for digest in batch])
            if items is None or not self._copy(key, listing.replica, items):
                return
            # What one answer had no room for is asked for again; what did not come at all is not to be had.
            missing = batch[len(items) :] + rest if items else rest
        self._read.put(key, listing.replica, listing.cursor)

    def _newest(self, key: bytes, digest: Digest) -> int:
        return max(self._storage.newest(key, digest.slot), self._copies.newest(key, digest.slot))

    def _copy(self, key: bytes, replica: Contact, items: Iterable[tuple[bytes, float]]) -> bool:
        """Take up what is valid; False if something was forged, which no honest replica has to give."""
        honest = True
        for raw, life in items:
            try:
                self._copies.accept(key, raw, life, source=replica.id, now=self._clock())
            except ForgedRecordError:
                honest = False
            except RecordError:
                continue
        return honest

    async def _list(
        self, protocol: RegistryProtocol, key: bytes, replica: Contact, since: _Cursor
    ) -> Listing | None:
        digests: list[Digest] = []

        def take(items: list[Digest], _: _Cursor) -> bool:
            digests.extend(items)
            return True

        async def ask(version: int) -> Part[Digest] | None:
            return await protocol.digests(replica, key, version)

        cursor = await _walk(since, ask, take)
        return None if cursor is None else Listing(replica, digests, cursor)


async def _walk(
    cursor: _Cursor,
    ask: Callable[[int], Awaitable[Part[T] | None]],
    take: Callable[[list[T], _Cursor], bool],
) -> _Cursor | None:
    """Go through pages from ``cursor`` to the end; the cursor reached, or None if that did not go well."""
    for _ in range(MAX_PAGES):
        part = await ask(cursor.version)
        if part is None:
            return None
        if part.instance != cursor.instance and cursor.version > 0:
            cursor = _Cursor()  # it has restarted: from the beginning
            continue
        cursor = _Cursor(part.instance, part.version)
        if not take(part.items, cursor):
            return None
        if not part.more:
            return cursor
        if not part.items:
            return None
    return None
