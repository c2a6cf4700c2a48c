"""The signed records that peers publish about themselves.

One envelope for all of them, BEP-44 style (mutable, Ed25519, sequence number), as a msgpack array::

    [version, kind, swarm, public key, seq, ttl in ms, body, signature]

The signature covers the packed bytes before it, exactly as they travel, so nothing depends on how a msgpack
library chooses to encode. Everything is checked when a record is opened; what comes out is frozen and typed.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import ClassVar, Final, Literal, Self, cast

import msgpack

from p2pllm.errors import RecordError
from p2pllm.identity import Identity, PeerId, peer_id_of, verify

__all__ = [
    "MAX_RECORD_BYTES",
    "MAX_TTL_S",
    "Body",
    "Header",
    "Kind",
    "MetricsBody",
    "PeerBody",
    "Record",
    "Span",
    "SpanState",
    "SwarmBody",
    "directory_key",
    "open_record",
    "peek",
    "seal",
    "swarm_id",
    "swarms_key",
]

MAX_RECORD_BYTES: Final = 1000
"""No record is larger, so that it fits one datagram with its envelope on any path."""

MAX_TTL_S: Final = 600.0
"""No record lives longer without being renewed by its owner."""

Kind = Literal["peer", "metrics", "swarm"]
SpanState = Literal["loading", "ready", "draining"]

_VERSION = 1
_CONTEXT = b"p2pllm record\0"
_SIGNATURE_BYTES = 64
_SIGNATURE_HEAD = bytes([0xC4, _SIGNATURE_BYTES])  # msgpack: a byte string of this length follows
_SEAL_BYTES = len(_SIGNATURE_HEAD) + _SIGNATURE_BYTES
_MAX_INT = 2**63 - 1
_MAX_LAYERS = 4096
_STATES: tuple[SpanState, ...] = ("loading", "ready", "draining")


@dataclass(frozen=True, slots=True)
class Span:
    """Layers ``[start, end)`` that a peer holds, and how far it is with them."""

    start: int
    end: int
    state: SpanState


@dataclass(frozen=True, slots=True)
class PeerBody:
    """What changes slowly: where a peer can be reached and what it could do.

    ``addresses`` are (host, port) of its link server, best first, at most 4; ``memory_bytes`` is what it
    offers, ``flops`` and ``bandwidth`` (bytes/s) are measured, ``capacity`` counts layers that fit.
    """

    kind: ClassVar[Kind] = "peer"

    addresses: tuple[tuple[str, int], ...]
    region: str
    hardware: str
    memory_bytes: int
    flops: float
    bandwidth: float
    capacity: int
    dtype: str
    quantization: str
    software: str
    leaving: bool

    def pack(self) -> list[object]:
        """The body as it travels: one flat list in field order."""
        return [
            [list(address) for address in self.addresses],
            self.region,
            self.hardware,
            self.memory_bytes,
            float(self.flops),
            float(self.bandwidth),
            self.capacity,
            self.dtype,
            self.quantization,
            self.software,
            self.leaving,
        ]

    @classmethod
    def parse(cls, packed: object) -> Self:
        """The inverse of ``pack``, for what a stranger sent; RecordError if a field is out of its limits."""
        fields = _Fields(packed, 11)
        return cls(
            addresses=tuple(_address(item) for item in fields.items(4)),
            region=fields.text(64),
            hardware=fields.text(96),
            memory_bytes=fields.count(),
            flops=fields.number(),
            bandwidth=fields.number(),
            capacity=fields.count(_MAX_LAYERS),
            dtype=fields.text(16),
            quantization=fields.text(16),
            software=fields.text(32),
            leaving=fields.flag(),
        )


@dataclass(frozen=True, slots=True)
class MetricsBody:
    """What changes with load.

    ``spans`` holds at most 3; ``layer_s`` (per layer and step), ``head_s`` and ``wait_s`` are seconds;
    ``memory_used`` is bytes. ``rho`` gives the one-way latency in seconds to at most 8 likely successors,
    each named by the first 16 hexadecimal digits of its peer id.
    """

    kind: ClassVar[Kind] = "metrics"

    spans: tuple[Span, ...]
    generation: int
    layer_s: float
    head_s: float
    wait_s: float
    running: int
    waiting: int
    free_kv_blocks: int
    memory_used: int
    rho: tuple[tuple[str, float], ...]

    def pack(self) -> list[object]:
        """The body as it travels: one flat list in field order."""
        return [
            [[span.start, span.end, _STATES.index(span.state)] for span in self.spans],
            self.generation,
            float(self.layer_s),
            float(self.head_s),
            float(self.wait_s),
            self.running,
            self.waiting,
            self.free_kv_blocks,
            self.memory_used,
            [[bytes.fromhex(prefix), float(seconds)] for prefix, seconds in self.rho],
        ]

    @classmethod
    def parse(cls, packed: object) -> Self:
        """The inverse of ``pack``, for what a stranger sent; RecordError if a field is out of its limits."""
        fields = _Fields(packed, 10)
        return cls(
            spans=tuple(_span(item) for item in fields.items(3)),
            generation=fields.count(),
            layer_s=fields.number(),
            head_s=fields.number(),
            wait_s=fields.number(),
            running=fields.count(),
            waiting=fields.count(),
            free_kv_blocks=fields.count(),
            memory_used=fields.count(),
            rho=tuple(_rho(item) for item in fields.items(8)),
        )


@dataclass(frozen=True, slots=True)
class SwarmBody:
    """An entry of the index of swarms: the model that a swarm serves and how many layers it has."""

    kind: ClassVar[Kind] = "swarm"

    model: str
    fingerprint: str
    layers: int

    def pack(self) -> list[object]:
        """The body as it travels: one flat list in field order."""
        return [self.model, self.fingerprint, self.layers]

    @classmethod
    def parse(cls, packed: object) -> Self:
        """The inverse of ``pack``, for what a stranger sent; RecordError if a field is out of its limits."""
        fields = _Fields(packed, 3)
        return cls(model=fields.text(128), fingerprint=fields.text(128), layers=fields.count(_MAX_LAYERS))


Body = PeerBody | MetricsBody | SwarmBody

_BODIES: dict[int, type[PeerBody] | type[MetricsBody] | type[SwarmBody]] = {
    1: PeerBody,
    2: MetricsBody,
    5: SwarmBody,  # 3 and 4 are the leader's claim and plan
}
_CODES: dict[Kind, int] = {body.kind: code for code, body in _BODIES.items()}


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
        envelope = [_VERSION, _CODES[body.kind], swarm, identity.public_key, seq, ttl_ms, body.pack(), b""]
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
        body=_BODIES[_CODES[header.kind]].parse(packed_body),
        raw=raw,
    )


def peek(raw: bytes) -> Header:
    """The header of a record, its form checked but *not* its signature; RecordError if it is malformed."""
    return _parse_envelope(raw)[0]


def swarm_id(fingerprint: str) -> bytes:
    """The 20-byte id of the swarm that serves the model with this fingerprint."""
    return _key(b"swarm", fingerprint.encode())


def directory_key(swarm: bytes) -> bytes:
    """The 20-byte DHT key under which the peers of a swarm publish their peer and metrics records."""
    return _key(b"directory", swarm)


def swarms_key() -> bytes:
    """The 20-byte DHT key of the index of all swarms."""
    return _key(b"swarms")


def _key(purpose: bytes, *parts: bytes) -> bytes:
    return hashlib.sha1(b"\0".join((b"p2pllm", purpose, *parts)), usedforsecurity=False).digest()


def _parse_envelope(raw: bytes) -> tuple[Header, object]:
    if len(raw) > MAX_RECORD_BYTES:
        raise RecordError(f"a record of {len(raw)} bytes is over the limit of {MAX_RECORD_BYTES}")
    try:
        envelope = msgpack.unpackb(raw, max_map_len=0, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        raise RecordError(f"a record is not msgpack: {error}") from error
    fields = _Fields(envelope, 8)
    if (version := fields.count()) != _VERSION:
        raise RecordError(f"a record has version {version}, this peer knows {_VERSION}: update the older one")
    if (code := fields.count()) not in _BODIES:
        raise RecordError(f"a record has the unknown kind {code}")
    header = Header(
        kind=_BODIES[code].kind,
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


class _Fields:
    """Reads the fields of a list that a stranger sent, in order; RecordError at the first that is wrong."""

    def __init__(self, packed: object, length: int) -> None:
        if not isinstance(packed, list) or len(packed) != length:
            raise RecordError(f"a record has something else where {length} fields belong")
        self._rest = iter(cast(list[object], packed))

    def next(self) -> object:
        return next(self._rest)

    def items(self, limit: int) -> list[object]:
        value = self.next()
        if not isinstance(value, list) or len(value) > limit:
            raise RecordError(f"a record has something else where at most {limit} items belong")
        return value

    def octets(self, length: int) -> bytes:
        value = self.next()
        if not isinstance(value, bytes) or len(value) != length:
            raise RecordError(f"a record has something else where {length} bytes belong")
        return value

    def text(self, limit: int) -> str:
        value = self.next()
        # Unprintable text would reach the terminals of others.
        if not isinstance(value, str) or len(value) > limit or not value.isprintable():
            raise RecordError(
                f"a record has something else where at most {limit} printable characters belong"
            )
        return value

    def count(self, limit: int = _MAX_INT) -> int:
        value = self.next()
        if type(value) is not int or not 0 <= value <= limit:  # a bool is an int to isinstance
            raise RecordError(f"a record has something else where a whole number up to {limit} belongs")
        return value

    def number(self) -> float:
        value = self.next()
        if not isinstance(value, float) or not math.isfinite(value) or value < 0:
            raise RecordError("a record has something else where a finite number of at least 0 belongs")
        return value

    def flag(self) -> bool:
        value = self.next()
        if not isinstance(value, bool):
            raise RecordError("a record has something else where yes or no belongs")
        return value


def _address(packed: object) -> tuple[str, int]:
    fields = _Fields(packed, 2)
    host, port = fields.text(255), fields.count(65535)
    if not host or not port:
        raise RecordError("a record has an address without host or port")
    return host, port


def _span(packed: object) -> Span:
    fields = _Fields(packed, 3)
    start, end = fields.count(_MAX_LAYERS), fields.count(_MAX_LAYERS)
    if start >= end:
        raise RecordError(f"a record has the empty span {start}:{end}")
    return Span(start, end, _STATES[fields.count(len(_STATES) - 1)])


def _rho(packed: object) -> tuple[str, float]:
    fields = _Fields(packed, 2)
    return fields.octets(8).hex(), fields.number()
