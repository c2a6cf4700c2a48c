"""ρ between any two peers, from what each has measured and published.

Pure. A pair that nobody measured gets the median of its pair of regions, and a pair of regions in which
nobody measured anything gets a figure typical for the same or for different places.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import median

from p2pllm.scheduling import PeerId, Rho
from p2pllm.swarm.view import PeerState

__all__ = ["PREFIX", "latency_of"]

PREFIX = 16
"""Hex digits of a peer id that a metrics record carries beside each ρ."""

SAME_REGION_S = 0.001
CROSS_REGION_S = 0.05


def latency_of(peers: Iterable[PeerState]) -> Rho:
    """One-way latency (s) from peer to peer; 0 from a peer to itself."""
    states = {state.peer: state for state in peers}
    by_prefix = {peer[:PREFIX]: peer for peer in states}
    measured: dict[tuple[PeerId, PeerId], float] = {}
    regional: dict[tuple[str, str], list[float]] = defaultdict(list)
    for peer, state in states.items():
        for prefix, seconds in state.metrics.rho if state.metrics is not None else ():
            other = by_prefix.get(prefix)
            if other is None or other == peer:
                continue
            measured[peer, other] = seconds
            regional[_regions(state, states[other])].append(seconds)
    medians = {pair: median(values) for pair, values in regional.items()}

    def rho(one: PeerId, other: PeerId) -> float | None:
        if one == other:
            return 0.0
        for pair in ((one, other), (other, one)):
            if pair in measured:
                return measured[pair]
        if one not in states or other not in states:
            return None
        regions = _regions(states[one], states[other])
        typical = SAME_REGION_S if regions[0] == regions[1] else CROSS_REGION_S
        return medians.get(regions, typical)

    return rho


def _regions(one: PeerState, other: PeerState) -> tuple[str, str]:
    first, second = sorted((one.body.region, other.body.region))
    return first, second
