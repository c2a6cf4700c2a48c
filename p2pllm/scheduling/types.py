"""The values that scheduling takes and gives: what peers offer and hold, pipelines, and chains."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

__all__ = [
    "Assignment",
    "Capacity",
    "Chain",
    "Holder",
    "Offer",
    "PeerId",
    "Pipeline",
    "Rho",
    "Slice",
    "Stage",
]

PeerId: TypeAlias = str
"""40 lowercase hex digits, the SHA-1 of a peer's public key; offline, any name."""

Rho: TypeAlias = Callable[[PeerId, PeerId], "float | None"]
"""One-way latency (s) from the first peer to the second; ``None`` when there is no edge."""


class Capacity(NamedTuple):
    """Layers that fit on a peer (c_i) by its place in a pipeline: a first stage also embeds, a last one also
    holds norm and LM head. None of the three others can exceed ``middle``.
    """

    middle: int
    first: int
    last: int
    both: int

    @classmethod
    def same(cls, layers: int) -> Capacity:
        """The same number of layers at every place."""
        return cls(layers, layers, layers, layers)

    def at(self, *, is_first: bool, is_last: bool) -> int:
        """Layers that fit at a place."""
        if is_first:
            return self.both if is_last else self.first
        return self.last if is_last else self.middle

    def holds(self, start: int, end: int, layers: int) -> bool:
        """Whether ``[start, end)`` of a model of so many layers is a slice that fits."""
        room = self.at(is_first=start == 0, is_last=end == layers)
        return 0 <= start < end <= layers and end - start <= room


@dataclass(frozen=True, slots=True)
class Offer:
    """What a peer brings to a placement.

    ``layer_s`` and ``head_s`` are seconds per token for one layer, and for norm and LM head, in the mix of
    prefill and decode that is expected; F_i is 1 / ``layer_s``. ``kv_bytes`` is what it keeps for KV caches,
    ``flops`` its FLOP/s.

    Raises ValueError for times, capacities or sizes that are negative, infinite or not a number.
    """

    peer: PeerId
    region: str
    capacity: Capacity
    layer_s: float
    head_s: float = 0.0
    kv_bytes: int = 0
    flops: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what no peer can offer."""
        places = (self.capacity.middle, self.capacity.first, self.capacity.last, self.capacity.both)
        if min(places) < 0 or max(places) > self.capacity.middle:
            raise ValueError(f"peer {self.peer}: capacities must be from 0 to the middle one, got {places}")
        if not 0 < self.layer_s < math.inf:
            raise ValueError(f"peer {self.peer}: seconds per layer must be above 0, got {self.layer_s}")
        if not all(0 <= value < math.inf for value in (self.head_s, self.kv_bytes, self.flops)):
            raise ValueError(f"peer {self.peer}: head time, KV bytes and FLOP/s must be 0 or more")


@dataclass(frozen=True, slots=True)
class Slice:
    """The layers ``[start, end)`` that a plan gives to a peer."""

    peer: PeerId
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Slices that together cover ``[0, L)`` in order, and the regions they lie in (one, as a rule)."""

    regions: tuple[str, ...]
    slices: tuple[Slice, ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """Who holds what: pipelines, and the slices of peers that stand beside them (spares).

    Raises ValueError for two slices of one peer.
    """

    pipelines: tuple[Pipeline, ...] = ()
    spares: tuple[Slice, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what would count a peer twice."""
        counts = Counter(part.peer for part in self.slices)
        if twice := [peer for peer, count in counts.items() if count > 1]:
            raise ValueError(f"peer {twice[0]} has more than one slice")

    @property
    def slices(self) -> tuple[Slice, ...]:
        """What everyone holds."""
        return (*(part for pipeline in self.pipelines for part in pipeline.slices), *self.spares)


@dataclass(frozen=True, slots=True)
class Holder:
    """One ready slice ``[start, end)`` of a peer; a peer with several spans has several holders.

    ``layer_s``, ``head_s`` and ``wait_s`` are the peer's published seconds per layer, for norm + LM head, and
    in its queue. ``kv_blocks`` is what it has free; ``None`` means unknown, which never rules it out.
    ``heard_s`` is the local time (s) of its newest record; without one it never goes stale.
    """

    peer: PeerId
    start: int
    end: int
    layer_s: float
    head_s: float = 0.0
    wait_s: float = 0.0
    kv_blocks: int | None = None
    heard_s: float = math.inf
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Stage:
    """One peer's part ``[start, end)`` of a chain, a sub-range of a slice that it holds."""

    peer: PeerId
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Chain:
    """Stages that cover ``[0, L)`` in order; ``latency_s`` is what one token takes around the ring.

    ``gap_s`` is by how much (s per token, entry's share included) a better chain might exist: 0, unless the
    search was cut short.
    """

    stages: tuple[Stage, ...]
    latency_s: float
    gap_s: float = 0.0
