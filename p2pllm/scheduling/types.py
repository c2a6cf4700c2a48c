"""The values that scheduling takes and gives: who holds which layers at what cost, and the chain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Chain", "Holder", "PeerId", "Rho", "Stage"]

PeerId: TypeAlias = str
"""40 lowercase hex digits, the SHA-1 of a peer's public key."""

Rho: TypeAlias = Callable[[PeerId, PeerId], "float | None"]
"""One-way latency (s) from the first peer to the second; ``None`` when there is no edge."""


@dataclass(frozen=True, slots=True)
class Holder:
    """One ready slice ``[start, end)`` of a peer; a peer with several spans has several holders.

    ``layer_s``, ``head_s`` and ``wait_s`` are the peer's published seconds per layer, for norm + LM head, and
    in its queue. ``kv_blocks`` is what it has free; ``None`` means unknown, which never rules it out.
    """

    peer: PeerId
    start: int
    end: int
    layer_s: float
    head_s: float = 0.0
    wait_s: float = 0.0
    kv_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """One peer's part ``[start, end)`` of a chain, a sub-range of a slice that it holds."""

    peer: PeerId
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Chain:
    """Stages that cover ``[0, L)`` in order; ``latency_s`` is what one token takes around the ring."""

    stages: tuple[Stage, ...]
    latency_s: float
