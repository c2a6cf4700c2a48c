"""Which chain a request takes: Phase 2 over the live view."""

from __future__ import annotations

import random
import time

from p2pllm.errors import NoRouteError
from p2pllm.scheduling import Chain, PeerId, find_chain
from p2pllm.swarm import STALE_S, View, latency_of

__all__ = ["Router"]


class Router:
    """Answers from the view alone; never waits for the network."""

    def __init__(self, *, view: View, layers: int, own: PeerId, rng: random.Random | None = None) -> None:
        self._view = view
        self._layers = layers
        self._own = own
        self._rng = rng

    def chain(
        self, *, expected_tokens: int, kv_blocks: int = 0, excluded: frozenset[PeerId] = frozenset()
    ) -> Chain:
        """The cheapest chain for one request. Raises NoRouteError with the layers that nobody serves.

        Peers whose records are late are avoided, but a slow record is better than no answer.
        """
        peers = self._view.peers(time.monotonic())
        stale = frozenset(state.peer for state in peers if state.age_s > STALE_S)
        holders = [holder for state in peers for holder in state.holders()]
        rho = latency_of(peers)

        def solve(avoided: frozenset[PeerId]) -> Chain:
            return find_chain(
                self._layers,
                holders,
                rho,
                entry=self._own,
                expected_tokens=expected_tokens,
                kv_blocks=kv_blocks,
                excluded=avoided,
                rng=self._rng,
            )

        try:
            return solve(excluded | stale)
        except NoRouteError:
            if not stale:
                raise
            return solve(excluded)
