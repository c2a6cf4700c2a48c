"""Measures ρ: pings the peers that a session of ours is likely to go to next."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import structlog

from p2pllm.errors import LinkError
from p2pllm.scheduling import PeerId
from p2pllm.swarm.backoff import BackOff
from p2pllm.swarm.latency import PREFIX
from p2pllm.swarm.view import PeerState
from p2pllm.transport import Links

__all__ = ["MAX_PROBED", "LatencyEstimates", "Prober", "likely_successors"]

MAX_PROBED = 8
"""As many ρ as a metrics record carries."""

FIRST_RETRY_S = 2.0
LAST_RETRY_S = 60.0
SMOOTHING = 0.3
WINDOW = 8
"""The minimum over this many probes bounds the estimate from above: a busy moment is not a long wire."""

log = structlog.get_logger()


class LatencyEstimates:
    """One-way latency to each probed peer: an EWMA that a recent minimum holds down. Pure."""

    def __init__(self) -> None:
        self._recent: dict[PeerId, list[float]] = {}
        self._smooth: dict[PeerId, float] = {}

    def add(self, peer: PeerId, round_trip_s: float) -> None:
        """Take in one measured round trip (s)."""
        one_way = round_trip_s / 2
        recent = self._recent.setdefault(peer, [])
        recent.append(one_way)
        del recent[:-WINDOW]
        # A probe that waited behind a busy loop counts as twice the best recent one at most.
        held = min(one_way, 2 * min(recent))
        self._smooth[peer] = held + (1 - SMOOTHING) * (self._smooth.get(peer, held) - held)

    def keep(self, peers: Sequence[PeerId]) -> None:
        """Forget everyone who is not in ``peers``."""
        for peer in set(self._smooth).difference(peers):
            del self._smooth[peer], self._recent[peer]

    def published(self) -> tuple[tuple[str, float], ...]:
        """(peer id prefix, seconds) pairs as a metrics record carries them."""
        return tuple((peer[:PREFIX], seconds) for peer, seconds in sorted(self._smooth.items()))[:MAX_PROBED]


def likely_successors(own: PeerId, end: int, layers: int, peers: Sequence[PeerState]) -> list[PeerState]:
    """Whom a chain may go to after us, likeliest first: holders of layer ``end`` (of layer 0 when we are
    last).
    """
    wanted = end % layers

    def distance(state: PeerState) -> tuple[int, PeerId]:
        spans = state.metrics.spans if state.metrics is not None else ()
        holds = any(span.start <= wanted < span.end for span in spans)
        return (0 if holds else 1, state.peer)

    return sorted((state for state in peers if state.peer != own and state.ready), key=distance)[:MAX_PROBED]


class Prober:
    """Keeps the estimates fresh over the links."""

    def __init__(self, links: Links, clock: Callable[[], float] = time.monotonic) -> None:
        self._links = links
        self._clock = clock
        # Peers that do not answer: a record may name anybody's address.
        self._unreached = BackOff(FIRST_RETRY_S, LAST_RETRY_S)
        self.estimates = LatencyEstimates()

    async def probe(self, targets: Sequence[PeerState]) -> None:
        """Ping every target once, all at the same time."""
        peers = {state.peer for state in targets}
        self.estimates.keep(sorted(peers))
        self._unreached.keep(peers)
        paused = self._unreached.paused(self._clock())
        await asyncio.gather(*(self._ping(state) for state in targets if state.peer not in paused))

    async def _ping(self, state: PeerState) -> None:
        try:
            await self._links.ensure(state.peer, state.body.addresses)
            self.estimates.add(state.peer, await self._links.ping(state.peer))
            self._unreached.worked(state.peer)
        except LinkError as error:
            self._unreached.failed(state.peer, self._clock())
            log.debug("probe_failed", peer=state.peer[:8], reason=str(error))
