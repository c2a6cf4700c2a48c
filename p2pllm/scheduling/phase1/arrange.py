"""From the members of a pipeline to its slices: who comes where, and who takes how many layers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from p2pllm.scheduling.network import Network
from p2pllm.scheduling.phase1.waterfill import fill
from p2pllm.scheduling.types import Capacity, Offer, PeerId, Pipeline, Slice

__all__ = ["arrange", "overlap"]

MAX_PERMUTED = 5
"""Members whose orders are all tried; more are ordered by nearest neighbour."""

CROSSING_S = 1e3
"""Added to a hop between regions while ordering, so that there are few of them."""


def arrange(
    layers: int, members: Sequence[Offer], network: Network, today: Mapping[PeerId, Slice]
) -> Pipeline:
    """The pipeline of ``members``, which are known to hold ``layers`` together.

    Of the orders whose ends fit, the one with the shortest ring, then with the least to move from ``today``.
    """
    uneven = _is_uneven(members, network)
    orders = list(_orders(layers, members, network, uneven=uneven, moving=bool(today)))
    some = [_slices(layers, order) for order in orders]
    best = 0
    if len(some) > 1:
        ranks = [
            (round(_ring_s(order, network), 9), -sum(overlap(part, today) for part in slices))
            for order, slices in zip(orders, some, strict=True)
        ]
        best = ranks.index(min(ranks))
    return Pipeline(tuple(sorted({offer.region for offer in members})), some[best])


def overlap(part: Slice, today: Mapping[PeerId, Slice]) -> int:
    """Layers of a slice that its peer holds already."""
    held = today.get(part.peer)
    return 0 if held is None else max(0, min(part.end, held.end) - max(part.start, held.start))


def _orders(
    layers: int, members: Sequence[Offer], network: Network, *, uneven: bool, moving: bool
) -> Iterator[tuple[Offer, ...]]:
    """Yield the orders that are worth trying, at least one."""
    capacities = tuple(member.capacity for member in members)
    ends = _ends(layers, capacities, tuple(member.head_s for member in members))
    if len(members) > MAX_PERMUTED or not (uneven or moving):
        ends = ends[:1]
    for f, e in ends:
        inner = [member for i, member in enumerate(members) if i not in (f, e)]
        middles: Iterable[Sequence[Offer]] = [inner]
        if len(members) > MAX_PERMUTED:
            middles = [_shortened(members[f], inner, members[e], network)] if uneven else [inner]
        elif uneven or moving:
            middles = itertools.permutations(inner)
        for middle in middles:
            yield (members[f],) if f == e else (members[f], *middle, members[e])


@lru_cache(maxsize=1024)
def _ends(layers: int, capacities: tuple[Capacity, ...], heads: tuple[float, ...]) -> list[tuple[int, int]]:
    """Who may come first and last, as indices: the ends that lose least room first, then the fastest head."""
    if len(capacities) == 1:
        return [(0, 0)]
    room = sum(capacity.middle for capacity in capacities)
    ends = (
        (first.middle - first.first + last.middle - last.last, heads[e], f, e)
        for f, first in enumerate(capacities)
        for e, last in enumerate(capacities)
        if f != e and first.first and last.last
    )
    return [(f, e) for lost, _, f, e in sorted(ends) if room - lost >= layers]


def _is_uneven(members: Sequence[Offer], network: Network) -> bool:
    """Whether the order makes a difference to the ring."""
    if len(members) <= 2:
        return False
    if not network.measured and len({member.region for member in members}) == 1:
        return False
    return len({network(a.peer, b.peer) for a in members for b in members if a is not b}) > 1


def _shortened(first: Offer, inner: list[Offer], last: Offer, network: Network) -> list[Offer]:
    """Order the middle by nearest neighbour, then swap while that shortens the ring."""
    order, left = [first], list(inner)
    while left:
        nearest = min(left, key=lambda member: _hop_s(order[-1], member, network))
        left.remove(nearest)
        order.append(nearest)
    order.append(last)
    length, improved = _ring_s(order, network), True
    while improved:
        improved = False
        for i, j in itertools.combinations(range(1, len(order) - 1), 2):
            order[i], order[j] = order[j], order[i]
            shorter = _ring_s(order, network)
            if shorter < length - 1e-9:
                length, improved = shorter, True
            else:
                order[i], order[j] = order[j], order[i]
    return order[1:-1]


def _ring_s(order: Sequence[Offer], network: Network) -> float:
    return sum(_hop_s(a, b, network) for a, b in zip(order, [*order[1:], order[0]], strict=True))


def _hop_s(one: Offer, other: Offer, network: Network) -> float:
    seconds = network(one.peer, other.peer)
    # A missing edge is worse than any crossing, but finite, so that other hops still count.
    return (CROSSING_S**2 if seconds is None else seconds) + (one.region != other.region) * CROSSING_S


def _slices(layers: int, order: Sequence[Offer]) -> tuple[Slice, ...]:
    """Deal out the layers by water-filling (Eq 4), the head counted as layers of the last stage."""
    end = len(order) - 1
    counts = _counts(
        layers,
        tuple(
            min(layers, offer.capacity.at(is_first=i == 0, is_last=i == end)) for i, offer in enumerate(order)
        ),
        tuple(1.0 / offer.layer_s for offer in order),
        order[-1].head_s / order[-1].layer_s,
    )
    bounds = [0, *itertools.accumulate(counts)]
    return tuple(
        Slice(offer.peer, start, stop) for offer, start, stop in zip(order, bounds, bounds[1:], strict=False)
    )


@lru_cache(maxsize=1024)
def _counts(
    layers: int, capacities: tuple[int, ...], speeds: tuple[float, ...], head_layers: float
) -> tuple[int, ...]:
    """Water-filling; a fleet has few kinds of pipelines, so most answers are known."""
    return tuple(fill(layers, capacities, speeds, head_layers=head_layers))
