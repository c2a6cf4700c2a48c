"""Where no region can hold a replica alone: the one pipeline that crosses regions, as seldom as can be."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from p2pllm.scheduling.network import Network
from p2pllm.scheduling.phase1.packing import Packing
from p2pllm.scheduling.types import Offer

__all__ = ["across", "shortfall"]

MAX_PERMUTED = 5
"""Regions, beside the first, whose orders are all tried; more go by nearest neighbour."""

MAX_SETS = 256
"""Sets of regions that are looked at for one number of regions, those with the most room first."""


def across(
    layers: int, regions: Mapping[str, Sequence[Offer]], network: Network, *, effort: int
) -> tuple[list[str], Packing] | None:
    """The regions of the pipeline and its packing, or None if all of them together do not suffice.

    Fewest regions (on a ring as many crossings), then the ring of regions that is cheapest at best, then
    fewest stages: as far as `MAX_SETS` reaches, that is with certainty for up to 10 regions.
    """
    ways = _ways(regions, network)
    room = {name: sum(o.capacity.middle for o in offers) for name, offers in regions.items()}
    names = sorted(regions, key=lambda name: (-room[name], name))
    most = list(itertools.accumulate(room[name] for name in names))
    for size in range(2, len(names) + 1):
        if most[size - 1] < layers:
            continue
        best: tuple[float, float] | None = None
        chosen: tuple[list[str], Packing] | None = None
        for some in itertools.islice(itertools.combinations(names, size), MAX_SETS):
            if sum(room[name] for name in some) < layers:
                continue
            cost = _ring_s(some, ways)
            if best is not None and cost > best[0]:
                continue
            members = [offer.capacity for name in some for offer in regions[name]]
            packing = Packing(layers, members, effort=effort)
            packing.solve(1)
            rank = (cost, packing.stages(1))
            if rank[1] < math.inf and (best is None or rank < best):
                best, chosen = rank, (list(some), packing)
        if chosen is not None:
            return chosen
    return None


def shortfall(layers: int, offers: Sequence[Offer]) -> str:
    """How far the peers are from holding the model, in one line."""
    room = sum(offer.capacity.middle for offer in offers)
    # The peers that lose least at an end (two, for one cannot hold both), or nobody and a layer less.
    firsts = sorted((o.capacity.middle - o.capacity.first, o.peer) for o in offers if o.capacity.first)[:2]
    lasts = sorted((o.capacity.middle - o.capacity.last, o.peer) for o in offers if o.capacity.last)[:2]
    together = [
        min(room - first_lost - last_lost, layers - (not first) - (not last))
        for first_lost, first in [*firsts, (0, "")]
        for last_lost, last in [*lasts, (0, "")]
        if first != last or not first
    ]
    alone = [offer.capacity.both for offer in offers]
    most = max(0, *alone, *(together if layers > 1 else ()))
    short = layers - most
    return (
        f"the model has {layers} layers but these {len(offers)} peers hold at most {most}: "
        f"{short} {'layer is' if short == 1 else 'layers are'} missing, add a peer or memory"
    )


def _ways(regions: Mapping[str, Sequence[Offer]], network: Network) -> dict[tuple[str, str], float]:
    """The cheapest hop (s) from each region to each other one."""
    region_of = {offer.peer: name for name, offers in regions.items() for offer in offers}
    ways: dict[tuple[str, str], float] = {}
    for pair in itertools.permutations(regions, 2):
        typical = network.typical(*pair)
        ways[pair] = math.inf if typical is None else typical
    for one, other in network.measured:
        for source, target in ((one, other), (other, one)):
            pair = (region_of.get(source, ""), region_of.get(target, ""))
            seconds = network(source, target)
            if pair in ways and seconds is not None:
                ways[pair] = min(ways[pair], seconds)
    return ways


def _ring_s(names: Sequence[str], ways: Mapping[tuple[str, str], float]) -> float:
    """The cheapest ring through all of the regions: exact for a few, by nearest neighbour beyond."""
    first, *others = names
    if len(others) > MAX_PERMUTED:
        order = [first]
        while others:
            order.append(min(others, key=lambda name: ways[order[-1], name]))
            others.remove(order[-1])
        return _length_s(order, ways)
    return min(_length_s([first, *order], ways) for order in itertools.permutations(others))


def _length_s(order: Sequence[str], ways: Mapping[tuple[str, str], float]) -> float:
    return sum(ways[pair] for pair in zip(order, [*order[1:], order[0]], strict=True))
