"""Measures ρ: pings the peers that a session of ours is likely to go to next, and a few others."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Collection, Sequence
from typing import Final

import structlog

from p2pllm.errors import LinkError
from p2pllm.scheduling import PeerId
from p2pllm.swarm.backoff import BackOff
from p2pllm.swarm.latency import PREFIX
from p2pllm.swarm.view import PeerState
from p2pllm.transport import Links

__all__ = ["MAX_PROBED", "LatencyEstimates", "Prober", "targets"]

MAX_PROBED: Final = 8
"""As many ρ as a metrics record carries."""

OTHERS: Final = 2
"""Of them, strangers who are no likely successors: all pairs of regions are to be measured by somebody."""

ROTATION_S: Final = 60.0
"""How long the same others are measured."""

MAX_LINKS: Final = 16
"""With so many links a peer brings up no more to measure those whom it is not likely to need."""

FIRST_RETRY_S: Final = 2.0
LAST_RETRY_S: Final = 60.0
SMOOTHING: Final = 0.3
WINDOW: Final = 8
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

    def keep(self, peers: Collection[PeerId]) -> None:
        """Forget everyone who is not in ``peers``."""
        for peer in set(self._smooth).difference(peers):
            del self._smooth[peer], self._recent[peer]

    def published(self) -> tuple[tuple[str, float], ...]:
        """(peer id prefix, seconds) pairs as a metrics record carries them."""
        return tuple((peer[:PREFIX], seconds) for peer, seconds in sorted(self._smooth.items()))[:MAX_PROBED]


def targets(
    own: PeerId, peers: Sequence[PeerState], *, layers: int, linked: Collection[PeerId], now: float
) -> list[PeerState]:
    """Whom to measure at time ``now`` (s), MAX_PROBED peers at most.

    First those whom a chain may go to after us: ready holders of the layer behind our last one, of layer 0
    when we are last or hold nothing. Equals are ordered by a hash of both ids, so that not everybody measures
    the same ones. Then a few others, each for a while: to whom there is a link, and some strangers as long as
    there are not too many links.
    """
    spans = next((state.metrics.spans for state in peers if state.peer == own and state.metrics), ())
    wanted = max((span.end for span in spans), default=0) % layers
    epoch = int(now // ROTATION_S)

    def dealt(state: PeerState, salt: object) -> bytes:
        return hashlib.blake2b(f"{own} {state.peer} {salt}".encode(), digest_size=8).digest()

    ready = [state for state in peers if state.peer != own and state.ready]
    next_ones = [state for state in ready if _holds(state, wanted)]
    likely = sorted(next_ones, key=lambda state: dealt(state, ""))[: MAX_PROBED - OTHERS]
    chosen = {state.peer for state in likely}
    others = sorted(
        (state for state in peers if state.peer != own and state.peer not in chosen),
        key=lambda state: dealt(state, epoch),
    )
    strangers = [state for state in others if state.peer not in linked]
    known = [state for state in others if state.peer in linked]
    return (likely + strangers[: OTHERS if len(linked) < MAX_LINKS else 0] + known)[:MAX_PROBED]


def _holds(state: PeerState, layer: int) -> bool:
    return any(holder.start <= layer < holder.end for holder in state.holders())


class Prober:
    """Keeps the estimates fresh over the links."""

    def __init__(self, links: Links, clock: Callable[[], float] = time.monotonic) -> None:
        self._links = links
        self._clock = clock
        # Peers that do not answer: a record may name anybody's address.
        self._unreached = BackOff(FIRST_RETRY_S, LAST_RETRY_S)
        self.estimates = LatencyEstimates()

    async def probe(self, own: PeerId, peers: Sequence[PeerState], layers: int) -> None:
        """Ping whom a session may go to next, and some others, once each, all at the same time."""
        now = self._clock()
        chosen = targets(own, peers, layers=layers, linked=self._links.peers(), now=now)
        here = {state.peer for state in chosen}
        self.estimates.keep(here)
        self._unreached.keep(here)
        paused = self._unreached.paused(now)
        await asyncio.gather(*(self._ping(state) for state in chosen if state.peer not in paused))

    async def _ping(self, state: PeerState) -> None:
        try:
            await self._links.ensure(state.peer, state.body.addresses, state.body.certificate)
            self.estimates.add(state.peer, await self._links.ping(state.peer))
            self._unreached.worked(state.peer)
        except LinkError as error:
            self._unreached.failed(state.peer, self._clock())
            log.debug("probe_failed", peer=state.peer[:8], reason=str(error))
