"""What peers say about themselves: what they are, and how they do."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from p2pllm.errors import RecordError
from p2pllm.records.fields import Fields
from p2pllm.records.limits import MAX_GENERATION, MAX_LAYERS, Kind

__all__ = ["MetricsBody", "PeerBody", "Span", "SpanState"]

SpanState = Literal["loading", "ready", "draining"]

_MAX_SECONDS = 3600.0
_MAX_RHO = 8
_MAX_RHO_S = 10.0  # sums of absurd figures would be infinite, and medians of them everybody's problem
_FINGERPRINT_BYTES = 32
_SECONDS = struct.Struct(">f")
_RHO = struct.Struct(">8sf")
_STATES: tuple[SpanState, ...] = ("loading", "ready", "draining")


@dataclass(frozen=True, slots=True)
class Span:
    """Layers ``[start, end)`` that a peer holds, and how far it is with them."""

    start: int
    end: int
    state: SpanState


@dataclass(frozen=True, slots=True)
class PeerBody:
    """What changes slowly: where a peer can be reached, what it could do, and what its owner wants.

    ``addresses`` are (host, port) of its link server and DHT node, best first, at most 4; ``certificate`` is
    the SHA-256 of the certificate that its link server shows, empty when it links without encryption.
    ``memory_bytes`` is what it offers, ``flops`` and ``bandwidth`` (bytes/s) are measured. ``capacity``
    counts the layers that fit as a middle, first, last, and only stage; ``kv_bytes`` is what it then keeps
    for KV caches; ``layer_s`` and ``head_s`` are seconds a token by the roofline, for one layer and for the
    head.

    A ``leaving`` peer takes no new sessions and will be gone, a ``paused`` one hands its layers over and
    takes no others, a ``pinned`` one chose its layers itself. ``replans`` counts how often its operator has
    asked for a new placement; ``force`` says that the last time it may interrupt the service.
    """

    kind: ClassVar[Kind] = "peer"

    addresses: tuple[tuple[str, int], ...]
    region: str
    hardware: str
    certificate: bytes
    memory_bytes: int
    flops: float
    bandwidth: float
    capacity: tuple[int, int, int, int]
    kv_bytes: int
    layer_s: float
    head_s: float
    dtype: str
    quantization: str
    software: str
    leaving: bool
    paused: bool
    pinned: bool
    replans: int
    force: bool

    def pack(self) -> list[object]:
        """The body as it travels: one flat list in field order."""
        return [
            [list(address) for address in self.addresses],
            self.region,
            self.hardware,
            self.certificate,
            self.memory_bytes,
            float(self.flops),
            float(self.bandwidth),
            list(self.capacity),
            self.kv_bytes,
            float(self.layer_s),
            float(self.head_s),
            self.dtype,
            self.quantization,
            self.software,
            self.leaving,
            self.paused,
            self.pinned,
            self.replans,
            self.force,
        ]

    @classmethod
    def parse(cls, packed: object) -> Self:
        """The inverse of ``pack``, for what a stranger sent; RecordError if a field is out of its limits."""
        fields = Fields(packed, 19)
        return cls(
            addresses=tuple(_address(item) for item in fields.items(4)),
            region=fields.text(64),
            hardware=fields.text(96),
            certificate=fields.octets(_FINGERPRINT_BYTES, empty=True),
            memory_bytes=fields.count(),
            flops=fields.number(),
            bandwidth=fields.number(),
            capacity=_capacity(fields.next()),
            kv_bytes=fields.count(),
            layer_s=fields.number(_MAX_SECONDS),
            head_s=fields.number(_MAX_SECONDS),
            dtype=fields.text(16),
            quantization=fields.text(16),
            software=fields.text(32),
            leaving=fields.flag(),
            paused=fields.flag(),
            pinned=fields.flag(),
            replans=fields.count(),
            force=fields.flag(),
        )


@dataclass(frozen=True, slots=True)
class MetricsBody:
    """What changes with load.

    ``spans`` holds at most 3; ``generation`` counts the changes of what the peer is to hold. ``layer_s`` (per
    layer and step), ``head_s`` and ``wait_s`` are seconds; KV blocks hold 16 tokens in all layers of the
    slice, and ``cached_kv_blocks`` of the free ones are kept of past sessions; ``memory_used`` is bytes of
    weights and KV caches, ``upload`` the bytes/s that real transfers reached (0: not known). ``rho`` gives
    the one-way latency in seconds to at most 8 likely successors, each named by the first 16 hexadecimal
    digits of its peer id.
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
    cached_kv_blocks: int
    memory_used: int
    upload: float
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
            self.cached_kv_blocks,
            self.memory_used,
            float(self.upload),
            b"".join(bytes.fromhex(prefix) + _SECONDS.pack(seconds) for prefix, seconds in self.rho),
        ]

    @classmethod
    def parse(cls, packed: object) -> Self:
        """The inverse of ``pack``, for what a stranger sent; RecordError if a field is out of its limits."""
        fields = Fields(packed, 12)
        return cls(
            spans=tuple(_span(item) for item in fields.items(3)),
            generation=fields.count(MAX_GENERATION),
            layer_s=fields.number(_MAX_SECONDS),
            head_s=fields.number(_MAX_SECONDS),
            wait_s=fields.number(_MAX_SECONDS),
            running=fields.count(),
            waiting=fields.count(),
            free_kv_blocks=fields.count(),
            cached_kv_blocks=fields.count(),
            memory_used=fields.count(),
            upload=fields.number(),
            rho=_rho(fields.next()),
        )


def _address(packed: object) -> tuple[str, int]:
    fields = Fields(packed, 2)
    host, port = fields.text(255), fields.count(65535)
    if not host or not port:
        raise RecordError("a record has an address without host or port")
    return host, port


def _span(packed: object) -> Span:
    fields = Fields(packed, 3)
    start, end = fields.count(MAX_LAYERS), fields.count(MAX_LAYERS)
    if start >= end:
        raise RecordError(f"a record has the empty span {start}:{end}")
    return Span(start, end, _STATES[fields.count(len(_STATES) - 1)])


def _capacity(packed: object) -> tuple[int, int, int, int]:
    fields = Fields(packed, 4)
    middle, first, last, both = (fields.count(MAX_LAYERS) for _ in range(4))
    return middle, first, last, both


def _rho(packed: object) -> tuple[tuple[str, float], ...]:
    if not isinstance(packed, bytes) or len(packed) not in range(0, _MAX_RHO * _RHO.size + 1, _RHO.size):
        raise RecordError(f"a record has something else where at most {_MAX_RHO} latencies belong")
    rho = tuple((prefix.hex(), seconds) for prefix, seconds in _RHO.iter_unpack(packed))
    if not all(0.0 <= seconds <= _MAX_RHO_S for _, seconds in rho):  # NaN is nowhere between
        raise RecordError(f"a record has a latency that is not from 0 to {_MAX_RHO_S:g} seconds")
    return rho
