"""The signed envelope: sealing records, and opening those of others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final, cast

import msgpack

from p2pllm.errors import RecordError
from p2pllm.identity import Identity, PeerId, peer_id_of, verify
from p2pllm.records.bodies import BODIES, CODES, Body
from p2pllm.records.fields import Fields
from p2pllm.records.keys import (
    MAX_DIRECTORY_BITS,
    directory_key,
    is_plan_key,
    leader_key,
    swarms_key,
)
from p2pllm.records.limits import Kind
from p2pllm.records.secrecy import SwarmKey

__all__ = ["MAX_RECORD_BYTES", "MAX_TTL_S", "Header", "Record", "open_record", "peek", "seal"]

MAX_RECORD_BYTES: Final = 1000
"""No record is larger, so that it fits one datagram with its envelope on any path."""

MAX_TTL_S: Final = 600.0
"""No record lives longer without being renewed by its owner."""

_VERSION = 2
_CONTEXT = b"p2pllm record\0"
_SIGNATURE_BYTES = 64
_SIGNATURE_HEAD = bytes([0xC4, _SIGNATURE_BYTES])  # msgpack: a byte string of this length follows
_SEAL_BYTES = len(_SIGNATURE_HEAD) + _SIGNATURE_BYTES


@dataclass(frozen=True, slots=True)
class Header:
    """What can be read off a record before its signature is checked; only good for sorting out duplicates."""

    kind: Kind
    swarm: bytes
    public_key: bytes
    seq: int
    ttl: float

    @property
    def peer_id(self) -> PeerId:
        """The id of the peer that claims to have signed."""
        return peer_id_of(self.public_key)

    def belongs_under(self, key: bytes) -> bool:
        """Whether ``key`` is one under which a record like this may be stored."""
        match self.kind:
            case "swarm":
                return key == swarms_key(self.swarm)
            case "claim":
                return key == leader_key(self.swarm)
            case "plan":
                return is_plan_key(self.swarm, key)
            case _:
                node_id = bytes.fromhex(self.peer_id)
                shards = (directory_key(self.swarm, node_id, bits) for bits in range(MAX_DIRECTORY_BITS + 1))
                return key in shards


@dataclass(frozen=True, slots=True)
class Record:
    """A record whose signature is checked. ``ttl`` is seconds, ``raw`` the signed bytes.

    It keeps no unpacked body: a thousand bytes of empty lists would take sixty thousand in memory.
    """

    kind: Kind
    swarm: bytes
    public_key: bytes
    peer_id: PeerId
    seq: int
    ttl: float
    raw: bytes

    def body(self, secret: SwarmKey | None = None) -> Body:
        """What the record says, every field checked.

        RecordError if a field is wrong, or if the body is sealed, or is not, against what ``secret`` wants:
        a private swarm takes nothing that was not sealed with its key.
        """
        packed = _parse_envelope(self.raw)[1]
        if isinstance(packed, bytes) != (secret is not None):
            raise RecordError("a record of a private swarm is sealed, others are not")
        if secret is not None:
            context = _sealed_with(self.kind, self.swarm, self.public_key, self.seq)
            packed = _unpack(secret.reveal(cast(bytes, packed), context))
        return BODIES[CODES[self.kind]].parse(packed)


def seal(
    identity: Identity, body: Body, *, swarm: bytes, seq: int, ttl: float, secret: SwarmKey | None = None
) -> bytes:
    """The signed bytes of a record, its body hidden if there is a ``secret``.

    ``swarm`` is 20 bytes, ``seq`` must grow with every record of this kind (a clock in milliseconds does),
    ``ttl`` is seconds. Raises RecordError if a field is out of its limits or the whole over MAX_RECORD_BYTES.
    """
    try:
        ttl_ms = round(ttl * 1000)
        packed: object = body.pack()
        if secret is not None:
            context = _sealed_with(body.kind, swarm, identity.public_key, seq)
            packed = secret.hide(_pack(packed), context)
        envelope = [_VERSION, CODES[body.kind], swarm, identity.public_key, seq, ttl_ms, packed, b""]
        unsigned = _pack(envelope)[:-2]  # without the empty signature
    except (OverflowError, TypeError, ValueError) as error:
        raise RecordError(f"a {body.kind} record cannot be encoded: {error}") from error
    raw = unsigned + _SIGNATURE_HEAD + identity.sign(_CONTEXT + unsigned)
    _to_record(raw, peek(raw)).body(secret)  # what others would refuse is refused here
    return raw


def open_record(raw: bytes) -> Record:
    """Check a record's form and signature; RecordError if anything about them is wrong.

    What it says is not looked at before ``Record.body``: whoever only passes a record on need not know.
    """
    header = peek(raw)
    if not verify(header.public_key, _CONTEXT + raw[:-_SEAL_BYTES], raw[-_SIGNATURE_BYTES:]):
        raise RecordError("the record's signature is not by the key it names")
    return _to_record(raw, header)


@lru_cache(1024)
def peek(raw: bytes) -> Header:
    """The header of a record, its form checked but *not* its signature; RecordError if it is malformed."""
    return _parse_envelope(raw)[0]


def _to_record(raw: bytes, header: Header) -> Record:
    return Record(
        kind=header.kind,
        swarm=header.swarm,
        public_key=header.public_key,
        peer_id=header.peer_id,
        seq=header.seq,
        ttl=header.ttl,
        raw=raw,
    )


def _sealed_with(kind: Kind, swarm: bytes, public_key: bytes, seq: int) -> bytes:
    """What a hidden body is bound to."""
    return _pack([CODES[kind], swarm, public_key, seq])


def _pack(value: object) -> bytes:
    # Half the digits of a float are more than anybody measures.
    return cast(bytes, msgpack.packb(value, use_single_float=True))


def _unpack(packed: bytes) -> object:
    try:
        return cast(object, msgpack.unpackb(packed, max_map_len=0, max_ext_len=0))
    except (ValueError, msgpack.UnpackException) as error:
        raise RecordError(f"a record is not msgpack: {error}") from error


def _parse_envelope(raw: bytes) -> tuple[Header, object]:
    if len(raw) > MAX_RECORD_BYTES:
        raise RecordError(f"a record of {len(raw)} bytes is over the limit of {MAX_RECORD_BYTES}")
    fields = Fields(_unpack(raw), 8)
    if (version := fields.count()) != _VERSION:
        raise RecordError(f"a record has version {version}, this peer knows {_VERSION}: update the older one")
    if (code := fields.count()) not in BODIES:
        raise RecordError(f"a record has the unknown kind {code}")
    header = Header(
        kind=BODIES[code].kind,
        swarm=fields.octets(20),
        public_key=fields.octets(32),
        seq=fields.count(),
        ttl=fields.count(round(MAX_TTL_S * 1000)) / 1000,
    )
    if not header.ttl:
        raise RecordError("a record has no time to live")
    body = fields.next()
    fields.octets(_SIGNATURE_BYTES)
    if raw[-_SEAL_BYTES:-_SIGNATURE_BYTES] != _SIGNATURE_HEAD:
        raise RecordError("a record's signature is not in its shortest form")
    return header, body
