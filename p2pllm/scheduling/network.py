"""ρ between peers: what was measured, else what is typical for their two regions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from p2pllm.scheduling.types import PeerId, Rho

__all__ = ["Network"]


@dataclass(frozen=True, slots=True)
class Network:
    """One-way latencies in seconds; calling it makes it a ``Rho``.

    ``measured`` overrides ``regional``, which overrides ``same_region_s`` and ``cross_region_s``. A pair that
    is measured in one direction only counts for both, likewise a pair of regions. ``None`` anywhere says that
    there is no edge. Peers missing from ``region_of`` have only measured edges.
    """

    region_of: Mapping[PeerId, str] = field(default_factory=dict)
    measured: Mapping[tuple[PeerId, PeerId], float | None] = field(default_factory=dict)
    regional: Mapping[tuple[str, str], float | None] = field(default_factory=dict)
    same_region_s: float | None = None
    cross_region_s: float | None = None

    @classmethod
    def table(cls, peers: Iterable[PeerId], rho: Rho) -> Network:
        """Every pair of ``peers`` measured by asking ``rho``."""
        names = sorted(set(peers))
        return cls(measured={(a, b): rho(a, b) for a in names for b in names if a != b})

    def __call__(self, source: PeerId, target: PeerId) -> float | None:
        """Return ρ from ``source`` to ``target`` (0 to itself), None when there is no edge."""
        if source == target:
            return 0.0
        if self.measured:
            for pair in ((source, target), (target, source)):
                if pair in self.measured:
                    return self.measured[pair]
        if source not in self.region_of or target not in self.region_of:
            return None
        return self.typical(self.region_of[source], self.region_of[target])

    def typical(self, source: str, target: str) -> float | None:
        """Return ρ from one region to another (or the same) where nothing was measured."""
        if self.regional:
            for pair in ((source, target), (target, source)):
                if pair in self.regional:
                    return self.regional[pair]
        return self.same_region_s if source == target else self.cross_region_s
