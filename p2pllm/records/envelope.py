"""The signed envelope: sealing records, and opening those of others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, cast

import msgpack

from p2pllm.errors import RecordError
from p2pllm.identity import Identity, PeerId, peer_id_of, verify
from p2pllm.records.bodies import BODIES, CODES, Body, Kind
from p2pllm.records.fields import Fields
from p2pllm.records.keys import directory_key, swarms_key

__all__ = ["MAX_RECORD_BYTES", "MAX_TTL_S", "Header", "Record", "open_record", "peek", "seal"]

MAX_RECORD_BYTES: Final = 1000
"""No record is larger, so that it fits one datagram with its envelope on any path."""

MAX_TTL_S: Final = 600.0
"""No record lives longer without being renewed by its owner."""

_VERSION = 1
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

    @property
    def key(self) -> bytes:
        """The only DHT key under which this record may be stored."""
        return swarms_key() if self.kind == "swarm" else directory_key(self.swarm)


@dataclass(frozen=True, slots=True)
class Record:
    """A record, its signature and every field checked. ``ttl`` is seconds, ``raw`` the signed bytes."""

    kind: Kind
    swarm: bytes
    public_key: bytes
    peer_id: PeerId
    seq: int
    ttl: float
    body: Body
    raw: bytes


def seal(identity: Identity, body: Body, *, swarm: bytes, seq: int, ttl: float) -> bytes:
    """The signed bytes of a record.

    ``swarm`` is 20 bytes, ``seq`` must grow with every record of this kind (a clock in milliseconds does),
    ``ttl`` is seconds. Raises RecordError if a field is out of its limits or the whole over MAX_RECORD_BYTES.
    """
    try:
        ttl_ms = round(ttl * 1000)
        envelope = [_VERSION, CODES[body.kind], swarm, identity.public_key, seq, ttl_ms, body.pack(), b""]
        unsigned = cast(bytes, msgpack.packb(envelope))[:-2]  # without the empty signature
    except (OverflowError, TypeError, ValueError) as error:
        raise RecordError(f"a {body.kind} record cannot be encoded: {error}") from error
    raw = unsigned + _SIGNATURE_HEAD + identity.sign(_CONTEXT + unsigned)
    type(body).parse(_parse_envelope(raw)[1])  # what others would refuse is refused here
    return raw


def open_record(raw: bytes) -> Record:
    """Check a record in full and return it typed; RecordError if anything about it is wrong."""
    header, packed_body = _parse_envelope(raw)
    if not verify(header.public_key, _CONTEXT + raw[:-_SEAL_BYTES], raw[-_SIGNATURE_BYTES:]):
        raise RecordError("the record's signature is not by the key it names")
    return Record(
        kind=header.kind,
        swarm=header.swarm,
        public_key=header.public_key,
        peer_id=header.peer_id,
        seq=header.seq,
        ttl=header.ttl,
        body=BODIES[CODES[header.kind]].parse(packed_body),
        raw=raw,
    )


def peek(raw: bytes) -> Header:
    """The header of a record, its form checked but *not* its signature; RecordError if it is malformed."""
    return _parse_envelope(raw)[0]


def _parse_envelope(raw: bytes) -> tuple[Header, object]:
    if len(raw) > MAX_RECORD_BYTES:
        raise RecordError(f"a record of {len(raw)} bytes is over the limit of {MAX_RECORD_BYTES}")
    try:
        envelope = msgpack.unpackb(raw, max_map_len=0, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        raise RecordError(f"a record is not msgpack: {error}") from error
    fields = Fields(envelope, 8)
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
