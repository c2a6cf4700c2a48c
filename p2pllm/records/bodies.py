"""What records say: one frozen dataclass for each kind, packed as a flat list in field order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from p2pllm.errors import RecordError
from p2pllm.records.fields import Fields

__all__ = [
    "BODIES",
    "CODES",
    "Body",
    "Kind",
    "MetricsBody",
    "PeerBody",
    "Span",
    "SpanState",
    "SwarmBody",
]

Kind = Literal["peer", "metrics", "swarm"]
SpanState = Literal["loading", "ready", "draining"]

_MAX_LAYERS = 4096
_MAX_SECONDS = 3600.0
_MAX_RHO = 10.0  # sums of absurd figures would be infinite, and medians of them everybody's problem
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
        fields = Fields(packed, 11)
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
        fields = Fields(packed, 10)
        return cls(
            spans=tuple(_span(item) for item in fields.items(3)),
            generation=fields.count(),
            layer_s=fields.number(_MAX_SECONDS),
            head_s=fields.number(_MAX_SECONDS),
            wait_s=fields.number(_MAX_SECONDS),
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
        fields = Fields(packed, 3)
        return cls(model=fields.text(128), fingerprint=fields.text(128), layers=fields.count(_MAX_LAYERS))


Body = PeerBody | MetricsBody | SwarmBody

BODIES: dict[int, type[PeerBody] | type[MetricsBody] | type[SwarmBody]] = {
    1: PeerBody,
    2: MetricsBody,
    5: SwarmBody,  # 3 and 4 are the leader's claim and plan
}
CODES: dict[Kind, int] = {body.kind: code for code, body in BODIES.items()}


def _address(packed: object) -> tuple[str, int]:
    fields = Fields(packed, 2)
    host, port = fields.text(255), fields.count(65535)
    if not host or not port:
        raise RecordError("a record has an address without host or port")
    return host, port


def _span(packed: object) -> Span:
    fields = Fields(packed, 3)
    start, end = fields.count(_MAX_LAYERS), fields.count(_MAX_LAYERS)
    if start >= end:
        raise RecordError(f"a record has the empty span {start}:{end}")
    return Span(start, end, _STATES[fields.count(len(_STATES) - 1)])


def _rho(packed: object) -> tuple[str, float]:
    fields = Fields(packed, 2)
    return fields.octets(8).hex(), fields.number(_MAX_RHO)
