"""What answers hold of a key: records with their remaining lives, or digests of them, 33 bytes each."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, Self, TypeAlias, TypeVar, get_args

from p2pllm.identity import PeerId
from p2pllm.records import Kind, Record

__all__ = [
    "DIGEST_BYTES",
    "SLOT_BYTES",
    "Digest",
    "Part",
    "Slot",
    "item_size",
    "pack_digests",
    "pack_records",
    "pack_slots",
    "parse_digests",
    "parse_records",
    "parse_slots",
]

Slot: TypeAlias = tuple[PeerId, Kind]
"""Of each there is one record under a key, the newest."""

T = TypeVar("T")

_ITEM_OVERHEAD_BYTES = 9  # msgpack: the pair, the life, the head of the byte string
_KINDS: Sequence[Kind] = get_args(Kind)
_DIGEST = struct.Struct(">20sBQL")
_SLOT = struct.Struct(">20sB")

DIGEST_BYTES: Final = _DIGEST.size
SLOT_BYTES: Final = _SLOT.size


@dataclass(frozen=True, slots=True)
class Part(Generic[T]):
    """A page of a key as another node gave it: nothing of it has been verified.

    ``items`` are newer than what was asked for, up to ``version``; ``more`` says that others follow.
    ``instance`` changes when the node has restarted and counts its versions anew.
    """

    instance: bytes
    version: int
    more: bool
    items: list[T]


class Digest(NamedTuple):
    """That a record is held: whose, its sequence number, and the life it has left in seconds.

    Nothing of it is signed.
    """

    peer_id: PeerId
    kind: Kind
    seq: int
    life: float

    @classmethod
    def of(cls, held: tuple[Record, float]) -> Self:
        """The digest of a record with this life left."""
        record, life = held
        return cls(record.peer_id, record.kind, record.seq, life)

    @property
    def slot(self) -> Slot:
        """What it names."""
        return self.peer_id, self.kind


def pack_digests(digests: Iterable[Digest]) -> bytes:
    """Digests as they travel: owner, kind, number, life in ms."""
    return b"".join(
        _DIGEST.pack(bytes.fromhex(peer_id), _KINDS.index(kind), seq, int(life * 1000))
        for peer_id, kind, seq, life in digests
    )


def parse_digests(packed: bytes) -> list[Digest]:
    """The digests that a stranger sent; those of unknown kind, and what is not whole, left out."""
    whole = packed[: len(packed) // DIGEST_BYTES * DIGEST_BYTES]
    return [
        Digest(node_id.hex(), _KINDS[kind], seq, life_ms / 1000)
        for node_id, kind, seq, life_ms in _DIGEST.iter_unpack(whole)
        if kind < len(_KINDS)
    ]


def pack_slots(slots: Iterable[Slot]) -> bytes:
    """Names of records as they travel."""
    return b"".join(_SLOT.pack(bytes.fromhex(peer_id), _KINDS.index(kind)) for peer_id, kind in slots)


def parse_slots(packed: bytes) -> list[Slot]:
    """The names that a stranger sent; those of unknown kind, and what is not whole, left out."""
    whole = packed[: len(packed) // SLOT_BYTES * SLOT_BYTES]
    return [(node_id.hex(), _KINDS[kind]) for node_id, kind in _SLOT.iter_unpack(whole) if kind < len(_KINDS)]


def pack_records(held: Iterable[tuple[Record, float]]) -> list[object]:
    """Records and remaining lives (s) as they travel, for msgpack."""
    return [[int(life * 1000), record.raw] for record, life in held]


def item_size(record: Record) -> int:
    """The bytes that a record takes on the way."""
    return len(record.raw) + _ITEM_OVERHEAD_BYTES


def parse_records(packed: Iterable[object]) -> list[tuple[bytes, float]]:
    """The raw records and remaining lives (s) that a stranger sent; what is neither is left out."""
    records: list[tuple[bytes, float]] = []
    for item in packed:
        match item:
            case [int(life_ms), bytes(raw)]:
                records.append((raw, life_ms / 1000))
    return records
