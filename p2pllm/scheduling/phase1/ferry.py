"""The pipeline over several regions that crosses as seldom and as cheaply as can be: exactly, for few peers.

Held and Karp's dynamic programme for the travelling salesman, over sets of peers instead of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

from p2pllm.scheduling.network import Network
from p2pllm.scheduling.types import Offer

__all__ = ["MAX_PEERS", "cheapest_crossing"]

MAX_PEERS = 9
"""Each more doubles the work."""

_Way: TypeAlias = tuple[int, float, float, tuple[int, ...]]
"""Crossings, seconds of them, seconds of all hops, and the peers in order: less is better, in that order."""


def cheapest_crossing(layers: int, offers: Sequence[Offer], network: Network) -> list[Offer] | None:
    """The members of the best pipeline in their order, None if there is none.

    Fewest hops between regions on the ring, then the cheapest ones, then fewest stages, then the shortest
    ring. Takes time exponential in the number of offers.
    """
    best: tuple[int, float, int, float] | None = None
    members: tuple[int, ...] = ()
    some = [offer for offer in offers if offer.capacity.middle]
    for first, start in enumerate(some):
        ways: dict[tuple[int, int], _Way] = {(1 << first, first): (0, 0.0, 0.0, (first,))}
        for _ in range(1, min(layers, len(some))):
            ways = _longer(ways, some, network)
            for (_, last), way in ways.items():
                if not _holds(layers, [some[i] for i in way[3]]):
                    continue
                crossings, cost, ring, path = _hop(way, some[last], start, network)
                rank = (crossings, round(cost, 12), len(path), ring)
                if ring < math.inf and (best is None or rank < best):
                    best, members = rank, path
    return [some[i] for i in members] if members else None


def _longer(
    ways: dict[tuple[int, int], _Way], offers: Sequence[Offer], network: Network
) -> dict[tuple[int, int], _Way]:
    """The best ways with one more peer, by the set of peers and the last of them."""
    longer: dict[tuple[int, int], _Way] = {}
    for (group, last), way in ways.items():
        for more, offer in enumerate(offers):
            if not group >> more & 1:
                crossings, cost, total, path = _hop(way, offers[last], offer, network)
                key, found = (group | 1 << more, more), (crossings, cost, total, (*path, more))
                if key not in longer or found < longer[key]:
                    longer[key] = found
    return longer


def _hop(way: _Way, source: Offer, target: Offer, network: Network) -> _Way:
    seconds = network(source.peer, target.peer)
    hop_s = math.inf if seconds is None else seconds
    crosses = source.region != target.region
    crossings, cost, total, path = way
    return crossings + crosses, cost + (hop_s if crosses else 0.0), total + hop_s, path


def _holds(layers: int, order: Sequence[Offer]) -> bool:
    first, *inner, last = (offer.capacity for offer in order)
    room = first.first + last.last + sum(capacity.middle for capacity in inner)
    return bool(first.first and last.last) and room >= layers
