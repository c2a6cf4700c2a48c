"""From the members of a pipeline to its slices: who comes where, and who takes how many layers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias

from p2pllm.scheduling.network import Network
from p2pllm.scheduling.phase1.waterfill import fill
from p2pllm.scheduling.types import Capacity, Offer, PeerId, Pipeline, Slice

__all__ = ["arrange", "in_order", "overlap"]

_Traits: TypeAlias = tuple[Capacity, float, float]
"""Capacity, seconds per layer, and seconds for the head: all that makes a difference where hops are alike."""

MAX_PERMUTED = 5
"""Members whose orders are all tried; more are ordered by nearest neighbour."""

CROSSING_S = 1e3
"""Added to a hop between regions while ordering, so that there are few of them."""


def arrange(
    layers: int, members: Sequence[Offer], network: Network, today: Mapping[PeerId, Slice]
) -> Pipeline:
    """The pipeline of ``members``, which are known to hold ``layers`` together.

    Of the orders whose ends fit, the one with the shortest ring, then with the least to move from ``today``;
    of more than `MAX_PERMUTED` members one that is good at the former, else at the latter.
    """
    uneven = _is_uneven(members, network)
    if (uneven or today) and len(members) <= MAX_PERMUTED:
        return in_order(layers, _best(layers, members, network, today))
    members = _as_today(members, today)
    order = [members[i] for i in _plain_order(layers, _traits(members))]
    if uneven:
        order[1:-1] = _shortened(order, network)
    return in_order(layers, order)


def in_order(layers: int, members: Sequence[Offer]) -> Pipeline:
    """The pipeline of ``members`` as they come."""
    return Pipeline(tuple(sorted({offer.region for offer in members})), _slices(layers, members))


def overlap(part: Slice, today: Mapping[PeerId, Slice]) -> int:
    """Layers of a slice that its peer holds already."""
    held = today.get(part.peer)
    return 0 if held is None else max(0, min(part.end, held.end) - max(part.start, held.start))


def _as_today(members: Sequence[Offer], today: Mapping[PeerId, Slice]) -> Sequence[Offer]:
    """The members in order of what they hold, and newcomers where nobody of them holds anything."""
    held = sorted((m for m in members if m.peer in today), key=lambda m: today[m.peer].start)
    newcomers = [member for member in members if member.peer not in today]
    order: list[Offer] = []
    reached = 0
    for member in held:
        while newcomers and reached < today[member.peer].start:
            order.append(newcomers.pop())
            reached += order[-1].capacity.middle
        order.append(member)
        reached = max(reached, today[member.peer].end)
    return order + newcomers


def _traits(members: Sequence[Offer]) -> tuple[_Traits, ...]:
    return tuple((member.capacity, member.layer_s, member.head_s) for member in members)


def _best(
    layers: int, members: Sequence[Offer], network: Network, today: Mapping[PeerId, Slice]
) -> list[Offer]:
    """The best order of all."""
    best: tuple[float, int] | None = None
    chosen: list[Offer] = []
    for f, e in _ends(layers, _traits(members)):
        inner = [i for i in range(len(members)) if i not in (f, e)]
        for middle in itertools.permutations(inner):
            order = [members[i] for i in dict.fromkeys((f, *middle, e))]
            kept = sum(overlap(part, today) for part in _slices(layers, order))
            rank = (round(_ring_s(order, network), 9), -kept)
            if best is None or rank < best:
                best, chosen = rank, order
    return chosen


@lru_cache(maxsize=1024)
def _plain_order(layers: int, members: tuple[_Traits, ...]) -> tuple[int, ...]:
    """The order where hops are alike: only the ends matter. A fleet has few kinds of pipelines."""
    f, e = _ends(layers, members)[0]
    return tuple(dict.fromkeys((f, *(i for i in range(len(members)) if i not in (f, e)), e)))


def _ends(layers: int, members: Sequence[_Traits]) -> list[tuple[int, int]]:
    """Who may come first and last, as indices: the ends that lose least room first, then the fastest head,
    then those that are farthest from each other already.
    """
    if len(members) == 1:
        return [(0, 0)]
    room = sum(capacity.middle for capacity, _, _ in members)
    ends = sorted(
        (first.middle - first.first + last.middle - last.last, head_s, f, -e)
        for f, (first, _, _) in enumerate(members)
        for e, (last, _, head_s) in enumerate(members)
        if f != e and first.first and last.last
    )
    return [(f, -e) for lost, _, f, e in ends if room - lost >= layers]


def _is_uneven(members: Sequence[Offer], network: Network) -> bool:
    """Whether the order makes a difference to the ring."""
    if len(members) <= 2:
        return False
    if not network.measured and len({member.region for member in members}) == 1:
        return False
    return len({network(a.peer, b.peer) for a in members for b in members if a is not b}) > 1


def _shortened(order: Sequence[Offer], network: Network) -> list[Offer]:
    """The middle of an order by nearest neighbour, then swapped while that shortens the ring."""
    first, *left, last = order
    order = [first]
    while left:
        here = order[-1]
        # Who is to be near the last stage comes late, or its region would be crossed into twice.
        nearest = min(left, key=lambda m: (here.region != m.region == last.region, _hop_s(here, m, network)))
        left.remove(nearest)
        order.append(nearest)
    order.append(last)
    improved = True
    while improved:
        improved = False
        for i, j in itertools.combinations(range(1, len(order) - 1), 2):
            # Hops from these places to the next ones are all that a swap changes.
            hops = {i - 1, i, j - 1, j}
            before = sum(_hop_s(order[at], order[at + 1], network) for at in hops)
            order[i], order[j] = order[j], order[i]
            if sum(_hop_s(order[at], order[at + 1], network) for at in hops) < before - 1e-9:
                improved = True
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
    bounds = _bounds(layers, _traits(order))
    return tuple(
        Slice(*part) for part in zip((offer.peer for offer in order), bounds, bounds[1:], strict=False)
    )


@lru_cache(maxsize=1024)
def _bounds(layers: int, order: tuple[_Traits, ...]) -> tuple[int, ...]:
    """Deal out the layers by water-filling (Eq 4), the head counted as layers of the last stage."""
    end = len(order) - 1
    room = [
        min(layers, capacity.at(is_first=i == 0, is_last=i == end))
        for i, (capacity, _, _) in enumerate(order)
    ]
    _, layer_s, head_s = order[-1]
    counts = fill(layers, room, [1.0 / pace for _, pace, _ in order], head_layers=head_s / layer_s)
    return (0, *itertools.accumulate(counts))
