"""What an entry has chosen since the peers last spoke.

Records are up to two seconds old. An entry that sent every request of these seconds to the peer that was idle
in the last record would pile them all up there, so it counts its own choices as waiting time at once.
"""

from __future__ import annotations

from collections.abc import Mapping

from p2pllm.scheduling.types import PeerId

__all__ = ["STALE_S", "Choices"]

STALE_S = 3.0
"""Two publishing periods: a record older than this says little of now, and neither does a choice."""


class Choices:
    """Seconds of work that an entry gave to peers, each until a newer record of that peer, 3 s at most."""

    def __init__(self) -> None:
        self._made: dict[
            PeerId, list[tuple[float, float]]
        ] = {}  # (local time, seconds of work), oldest first

    def add(self, work_s: Mapping[PeerId, float], now: float) -> None:
        """Take in one chain: what a token of it takes on each of its peers (s), chosen at ``now``."""
        for peer, seconds in work_s.items():
            self._made.setdefault(peer, []).append((now, seconds))

    def heard(self, peer: PeerId, at: float) -> None:
        """Forget what was chosen up to ``at``, when a record of ``peer`` arrived: it tells better."""
        left = [choice for choice in self._made.pop(peer, ()) if choice[0] > at]
        if left:
            self._made[peer] = left

    def waits(self, now: float) -> dict[PeerId, float]:
        """Return what to add to each peer's ``wait_s`` (s)."""
        for peer in list(self._made):
            self.heard(peer, now - STALE_S)
        return {peer: sum(seconds for _, seconds in made) for peer, made in self._made.items()}
