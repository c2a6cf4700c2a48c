"""Which chain a request takes: Phase 2 over the live view, away from peers that have just failed us."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable

from p2pllm.errors import NoRouteError
from p2pllm.scheduling import Chain, PeerId, find_chain
from p2pllm.swarm import STALE_S, BackOff, View, latency_of

__all__ = ["Router"]

BAN_S = 2.0
"""How long a peer is avoided after its first failure; doubled with each further one."""

MAX_BAN_S = 120.0


class Router:
    """Answers from the view and its own memory alone; never waits for the network."""

    def __init__(
        self,
        *,
        view: View,
        layers: int,
        own: PeerId,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._view = view
        self._layers = layers
        self._own = own
        self._rng = rng
        self._clock = clock
        self._bans = BackOff(BAN_S, MAX_BAN_S)

    def chain(
        self,
        *,
        expected_tokens: int,
        kv_blocks: int = 0,
        excluded: frozenset[PeerId] = frozenset(),
        severed: frozenset[tuple[PeerId, PeerId]] = frozenset(),
    ) -> Chain:
        """The cheapest chain for one request, without ``excluded`` peers and ``severed`` hops (from, to).

        Raises NoRouteError with the layers that nobody serves.

        Peers whose records are late, and those that failed lately, are avoided; but a doubtful chain is
        better than none.
        """
        now = self._clock()
        peers = self._view.peers(now)
        doubtful = frozenset(state.peer for state in peers if state.age_s > STALE_S) | self._bans.paused(now)
        holders = [holder for state in peers for holder in state.holders()]
        latency = latency_of(peers)

        def rho(one: PeerId, other: PeerId) -> float | None:
            return None if (one, other) in severed else latency(one, other)

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
            return solve(excluded | doubtful)
        except NoRouteError:
            if not doubtful - excluded:
                raise
            return solve(excluded)

    def blame(self, peers: Iterable[PeerId]) -> None:
        """These peers failed a session: avoid them, the longer the more often."""
        for peer in peers:
            self._bans.failed(peer, self._clock())

    def trust(self, peers: Iterable[PeerId]) -> None:
        """These peers served a session to its end."""
        for peer in peers:
            self._bans.worked(peer)
