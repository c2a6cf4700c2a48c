"""What is asked of the processes of the bench, and what they saw: plain values that go over a pipe."""

from __future__ import annotations

from dataclasses import dataclass, field

from p2pllm.bench.wires import Traffic
from p2pllm.identity import PeerId

__all__ = ["Samples", "Setting", "Sighting"]

Sighting = tuple[PeerId, int, float]
"""A peer, how many events it had had, and when that was so, or was seen (s of the monotonic clock)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What members are like. ``encrypted``: their links; ``seed``: of all that is drawn."""

    encrypted: bool
    seed: int


@dataclass(slots=True, kw_only=True)
class Samples:
    """What one process saw of its members in ``seconds``.

    It ``ended`` at that time of the monotonic clock. ``looked`` counts the live peers that should have been
    in some view each time that somebody looked, and ``missing`` those of them that were not. ``ages`` are
    those of the newest record of each that was, in seconds, ``puts`` the seconds that puts took.
    ``sightings`` lists for each member when it saw which event of whom; ``gone_s`` is when none of the dead
    was in any view any more, None if never.
    """

    members: int
    seconds: float
    cpu_s: float = 0.0
    looked: int = 0
    missing: int = 0
    ages: list[float] = field(default_factory=list)
    puts: list[float] = field(default_factory=list)
    events: list[Sighting] = field(default_factory=list)
    ended: float = 0.0
    sightings: dict[PeerId, list[Sighting]] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)
    gone_s: float | None = None
