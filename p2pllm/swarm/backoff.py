"""Whom to leave alone for a while: peers that failed, the longer the more often. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from p2pllm.scheduling import PeerId

__all__ = ["BackOff"]


@dataclass(frozen=True, slots=True)
class _Pause:
    seconds: float
    until: float


class BackOff:
    """Pauses of ``first`` seconds after a first failure, doubled with each further one up to ``most``."""

    def __init__(self, first: float, most: float) -> None:
        self._first = first
        self._most = most
        self._pauses: dict[PeerId, _Pause] = {}

    def failed(self, peer: PeerId, now: float) -> None:
        """``peer`` has failed at time ``now`` (s)."""
        known = self._pauses.get(peer)
        seconds = self._first if known is None else min(2 * known.seconds, self._most)
        self._pauses[peer] = _Pause(seconds, now + seconds)

    def worked(self, peer: PeerId) -> None:
        """``peer`` is good again; its next pause is short."""
        self._pauses.pop(peer, None)

    def keep(self, peers: Iterable[PeerId]) -> None:
        """Forget everyone who is not in ``peers``."""
        kept = set(peers)
        self._pauses = {peer: pause for peer, pause in self._pauses.items() if peer in kept}

    def paused(self, now: float) -> frozenset[PeerId]:
        """Whom to leave alone now. ``most`` seconds after the end of a pause it is forgotten."""
        self._pauses = {peer: pause for peer, pause in self._pauses.items() if now < pause.until + self._most}
        return frozenset(peer for peer, pause in self._pauses.items() if now < pause.until)
