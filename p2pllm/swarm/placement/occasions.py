"""What makes a leader wait with a plan, or make one: peers that are just arriving, and operators. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from p2pllm.scheduling import PeerId
from p2pllm.swarm.placement.members import Roster
from p2pllm.swarm.view import PeerState

__all__ = ["Arrivals", "Requests"]

QUIET_S: Final = 0.3
"""While the swarm serves nobody, peers that arrive within so long of each other are placed together."""

PATIENCE_S: Final = 0.8
"""But the first of them waits no longer than this."""

REQUEST_S: Final = 5.0
"""The least time between two placements that operators ask for."""


class Arrivals:
    """Lets peers that start together be placed together."""

    def __init__(self) -> None:
        self.waits = False
        """Whether somebody waits for others."""
        self._known: frozenset[PeerId] = frozenset()
        self._first_s = self._last_s = -math.inf  # when those arrived who wait

    def settling(self, now: float, roster: Roster) -> bool:
        """Whether more peers may be about to arrive while nobody is served."""
        present = frozenset(member.offer.peer for member in roster.standing)
        if present - self._known:
            self._last_s = now
            self._first_s = self._first_s if self.waits else now
            self.waits = True
        self._known = present
        quiet = now - self._last_s >= QUIET_S or now - self._first_s >= PATIENCE_S
        self.waits = self.waits and not quiet and not roster.serves
        return self.waits


class Requests:
    """Counts what operators ask for; what was asked before this leader came is done, or asked for again."""

    def __init__(self) -> None:
        self.force = False
        """Whether a request that was due allows interruptions."""
        self._counts: dict[PeerId, int] = {}
        self._open: set[bool] = set()  # forces of requests
        self._due_s = -math.inf

    def note(self, states: Sequence[PeerState]) -> None:
        """Compare the peers' counters with what they were."""
        for state in states:
            if state.body.replans > self._counts.get(state.peer, state.body.replans):
                self._open.add(state.body.force)
        self._counts = {state.peer: state.body.replans for state in states}

    def due(self, now: float) -> bool:
        """Whether to place everybody anew now: true once for all requests since the last time."""
        if not self._open or now - self._due_s < REQUEST_S:
            return False
        self.force, self._due_s = True in self._open, now
        self._open.clear()
        return True
