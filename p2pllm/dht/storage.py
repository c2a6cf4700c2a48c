"""Records that this node holds: verified, versioned, expiring, bounded. Sans-IO: time is an argument.

A record comes with the life it has left. Handing it on never lengthens that: a node gives a sequence number
at most the record's own time to live from the moment it first saw it, and remembers the numbers of what
expired, so that no record is passed round for ever.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Final

from p2pllm.errors import RecordError
from p2pllm.records import Kind, Record, open_record, peek

__all__ = ["Page", "Records"]

MAX_RECORDS: Final = 16_384
MAX_PER_KEY: Final = 1024
REMEMBER_S: Final = 600.0

_SWEEP_S = 1.0
_ITEM_OVERHEAD_BYTES = 9  # msgpack: the pair, the life, the head of the byte string

_Slot = tuple[bytes, Kind]


@dataclass(slots=True)
class _Entry:
    record: Record
    source: str
    version: int
    first_seen: float
    expires: float


@dataclass(frozen=True, slots=True)
class Page:
    """Part of a key's records, each with its remaining life in seconds.

    ``cursor`` is the version of the last; ``more`` says that newer ones follow.
    """

    items: list[tuple[float, Record]]
    cursor: int
    more: bool


class Records:
    """Per key the newest record of each (peer, kind).

    ``max_per_source`` bounds how many records one source (a host) may have here, so that nobody crowds out
    others.
    """

    def __init__(self, *, max_per_source: int = MAX_PER_KEY) -> None:
        self._max_per_source = max_per_source
        # The entries of a key are in the order of their versions: an updated one moves to the end.
        self._keys: dict[bytes, OrderedDict[_Slot, _Entry]] = {}
        self._sources: Counter[str] = Counter()
        self._expired: OrderedDict[tuple[bytes, _Slot], tuple[int, float]] = OrderedDict()
        self._version = 0
        self._next_sweep = float("-inf")

    def __len__(self) -> int:
        return self._sources.total()

    def __bool__(self) -> bool:
        return True  # the package replaces a storage that is false

    def accept(self, key: bytes, raw: bytes, life: float, *, source: str, now: float) -> bool:
        """Keep a record for at most ``life`` seconds; whether it is held now.

        Refused are records older than the one held or remembered, another one with the same number, and
        newcomers over a quota. Raises RecordError if it is not a valid record that belongs under ``key``.
        The signature, the one costly check, comes last.
        """
        header = peek(raw)
        if header.key != key:
            raise RecordError("a record was sent for a key that it does not belong under")
        self._sweep(now)
        slot = header.public_key, header.kind
        held = self._keys[key].get(slot) if key in self._keys else None
        expires = now + min(life, header.ttl)
        if held is not None and raw == held.record.raw and held.expires > now:
            # An honest copy never has more life left than the first: this only undoes a wilful shortening.
            held.expires = max(held.expires, min(expires, held.first_seen + header.ttl))
            return True
        newest, _ = self._expired.get((key, slot), (-1, now)) if held is None else (held.record.seq, now)
        if header.seq <= newest or expires <= now or (held is None and self._full(key, source)):
            return False
        record = open_record(raw)
        if held is not None:
            self._sources[held.source] -= 1
        self._sources[source] += 1
        self._version += 1
        entries = self._keys.setdefault(key, OrderedDict())
        entries[slot] = _Entry(record, source, self._version, first_seen=now, expires=expires)
        entries.move_to_end(slot)
        return True

    def live(self, key: bytes, now: float) -> list[Record]:
        """The records of a key that have not expired."""
        return [entry.record for entry in self._keys.get(key, {}).values() if entry.expires > now]

    def page(self, key: bytes, since: int, limit_bytes: int, now: float) -> Page:
        """The live records of a key with a version above ``since``, as many as fit."""
        items: list[tuple[float, Record]] = []
        for entry in self._keys.get(key, {}).values():
            if entry.version <= since or entry.expires <= now:
                continue
            limit_bytes -= len(entry.record.raw) + _ITEM_OVERHEAD_BYTES
            if limit_bytes < 0:
                return Page(items, since, more=True)
            items.append((entry.expires - now, entry.record))
            since = entry.version
        return Page(items, since, more=False)

    def _full(self, key: bytes, source: str) -> bool:
        return (
            len(self) >= MAX_RECORDS
            or len(self._keys.get(key, {})) >= MAX_PER_KEY
            or self._sources[source] >= self._max_per_source
        )

    def _sweep(self, now: float) -> None:
        """Forget what has expired, but not its sequence numbers; at most once a second."""
        if now < self._next_sweep:
            return
        self._next_sweep = now + _SWEEP_S
        for key, entries in list(self._keys.items()):
            for slot, entry in list(entries.items()):
                if entry.expires <= now:
                    del entries[slot]
                    self._sources[entry.source] -= 1
                    self._expired[key, slot] = entry.record.seq, now + REMEMBER_S
                    self._expired.move_to_end((key, slot))
            if not entries:
                del self._keys[key]
        self._sources += Counter()  # drops the sources that have nothing left
        while self._expired and (
            len(self._expired) > MAX_RECORDS or next(iter(self._expired.values()))[1] <= now
        ):
            self._expired.popitem(last=False)
