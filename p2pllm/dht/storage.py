"""Records that this node holds: verified, versioned, expiring, bounded. Sans-IO: time is an argument.

A record comes with the life it has left. Handing it on never lengthens that: a node gives a sequence number
at most the record's own time to live from the moment it first saw it, and remembers the numbers of what
expired, so that no record is passed round for ever.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from p2pllm.dht.pages import Slot, item_size
from p2pllm.errors import RecordError
from p2pllm.records import Record, open_record, peek

__all__ = ["ForgedRecordError", "Held", "Page", "Records"]

MAX_RECORDS: Final = 8192
MAX_PER_KEY: Final = 1024
REMEMBER_S: Final = 600.0

_SWEEP_S = 2.0


class ForgedRecordError(RecordError):
    """A record whose signature is not by the key it names: no honest node has such a one to hand on."""


class Held(NamedTuple):
    """A record and the life it has left, in seconds."""

    record: Record
    life: float


@dataclass(slots=True)
class _Entry:
    record: Record
    source: Hashable
    version: int
    first_seen: float
    expires: float


@dataclass(frozen=True, slots=True)
class Page:
    """Part of a key's records. ``cursor`` is the version of the last; ``more`` says that newer ones
    follow.
    """

    items: list[Held]
    cursor: int
    more: bool


class Records:
    """Per key the newest record of each (peer, kind).

    ``max_records`` bounds all of them, ``max_per_key`` those under one key, ``max_per_source`` those from one
    source under all keys. Where there is no more room, a newcomer takes the place of the oldest record from
    the source that has most, if that has more than its own: so nobody, and no crowd either, shuts others out.
    ``open_checked`` checks a record: several storages may share a cached one.
    """

    def __init__(
        self,
        *,
        max_records: int = MAX_RECORDS,
        max_per_key: int = MAX_PER_KEY,
        max_per_source: int = MAX_PER_KEY,
        open_checked: Callable[[bytes], Record] = open_record,
    ) -> None:
        self._max_records = max_records
        self._max_per_key = max_per_key
        self._max_per_source = max_per_source
        self._open = open_checked
        # The entries of a key are in the order of their versions: an updated one moves to the end.
        self._keys: dict[bytes, OrderedDict[Slot, _Entry]] = {}
        self._sources: Counter[Hashable] = Counter()
        self._expired: OrderedDict[tuple[bytes, Slot], tuple[int, float]] = OrderedDict()
        self._version = 0
        self._next_sweep = float("-inf")

    def __len__(self) -> int:
        return self._sources.total()

    def __bool__(self) -> bool:
        return True  # the package replaces a storage that is false

    def accept(self, key: bytes, raw: bytes, life: float, *, source: Hashable, now: float) -> bool:
        """Keep a record for at most ``life`` seconds; whether it is held now.

        Refused are records older than the one held or remembered, another one with the same number, and
        newcomers for whom there is no room. Raises RecordError if it is not a valid record that belongs under
        ``key``, ForgedRecordError if only its signature is wrong. The signature, the one costly check, comes
        last.
        """
        header = peek(raw)
        if not header.belongs_under(key):
            raise RecordError("a record was sent for a key that it does not belong under")
        self._sweep(now)
        slot = header.peer_id, header.kind
        held = self._keys[key].get(slot) if key in self._keys else None
        expires = now + min(life, header.ttl)
        if held is not None and raw == held.record.raw and held.expires > now:
            # An honest copy never has more life left than the first: this only undoes a wilful shortening.
            held.expires = max(held.expires, min(expires, held.first_seen + header.ttl))
            return True
        if header.seq <= self.newest(key, slot) or expires <= now:
            return False
        in_the_way = () if held is not None else self._in_the_way(key, source)
        if in_the_way is None:
            return False
        try:
            record = self._open(raw)
        except RecordError as error:
            raise ForgedRecordError(str(error)) from error
        for place in in_the_way:
            self._remove(*place, now)
        if held is not None:
            self._sources[held.source] -= 1
        self._sources[source] += 1
        self._version += 1
        entries = self._keys.setdefault(key, OrderedDict())
        entries[slot] = _Entry(record, source, self._version, first_seen=now, expires=expires)
        entries.move_to_end(slot)
        return True

    def newest(self, key: bytes, slot: Slot) -> int:
        """The highest sequence number held, or remembered of what expired; -1 if there is none."""
        held = self._keys[key].get(slot) if key in self._keys else None
        return held.record.seq if held is not None else self._expired.get((key, slot), (-1, 0.0))[0]

    def live(self, key: bytes, now: float) -> list[Held]:
        """The records of a key that have not expired."""
        return self.pick(key, self._keys.get(key, ()), now)

    def pick(self, key: bytes, slots: Iterable[Slot], now: float) -> list[Held]:
        """Those of the named records that are held and have not expired."""
        entries: Mapping[Slot, _Entry] = self._keys.get(key, {})
        picked = (entries[slot] for slot in slots if slot in entries)
        return [Held(entry.record, entry.expires - now) for entry in picked if entry.expires > now]

    def page(
        self, key: bytes, since: int, limit_bytes: int, now: float, item_bytes: int | None = None
    ) -> Page:
        """The live records of a key with a version above ``since``, oldest first, as many as fit.

        An item takes ``item_bytes``, or what the whole record takes.
        """
        newer: list[_Entry] = []
        for entry in reversed(self._keys.get(key, {}).values()):
            if entry.version <= since:
                break
            if entry.expires > now:
                newer.append(entry)
        items: list[Held] = []
        for entry in reversed(newer):
            limit_bytes -= item_bytes or item_size(entry.record)
            if limit_bytes < 0:
                return Page(items, since, more=True)
            items.append(Held(entry.record, entry.expires - now))
            since = entry.version
        return Page(items, since, more=False)

    def _in_the_way(self, key: bytes, source: Hashable) -> Sequence[tuple[bytes, Slot]] | None:
        """What must go for a newcomer from ``source``, one record at most; None if it has to stay out."""
        if self._sources[source] >= self._max_per_source:
            return None
        if len(self._keys.get(key, ())) >= self._max_per_key:
            crowded = {key: self._keys[key]}
            shares = Counter(entry.source for entry in self._keys[key].values())
        elif len(self) >= self._max_records:
            crowded, shares = self._keys, self._sources
        else:
            return ()
        ((greediest, share),) = shares.most_common(1)
        if share <= shares[source] + 1:
            return None
        places = ((one, slot) for one, entries in crowded.items() for slot in entries)
        return [next(place for place in places if self._keys[place[0]][place[1]].source == greediest)]

    def _remove(self, key: bytes, slot: Slot, now: float) -> None:
        """Take out a record, but remember its sequence number."""
        entry = self._keys[key].pop(slot)
        if not self._keys[key]:
            del self._keys[key]
        self._sources[entry.source] -= 1
        self._expired[key, slot] = entry.record.seq, now + REMEMBER_S
        self._expired.move_to_end((key, slot))

    def _sweep(self, now: float) -> None:
        """Forget what has expired, but not its sequence numbers; every two seconds at most."""
        if now < self._next_sweep:
            return
        self._next_sweep = now + _SWEEP_S
        for key, entries in list(self._keys.items()):
            for slot, entry in list(entries.items()):
                if entry.expires <= now:
                    self._remove(key, slot, now)
        self._sources += Counter()  # drops the sources that have nothing left
        while self._expired and (
            len(self._expired) > self._max_records or next(iter(self._expired.values()))[1] <= now
        ):
            self._expired.popitem(last=False)
