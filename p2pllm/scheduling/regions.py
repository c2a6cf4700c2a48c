"""Regions of peers that were given none: whoever is near each other shares one.

A peer takes the region of its nearest peer when that is nearer than 15 ms, else it opens a new one. Who joins
first decides nothing: always the peer that is nearest to those with a region is next, and where none is near,
the lowest id (of those that had a region before, if any) opens one.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from p2pllm.scheduling.types import PeerId

__all__ = ["KEEP_S", "NEAR_S", "derive_regions"]

_Distances: TypeAlias = defaultdict[PeerId, dict[PeerId, float]]

NOBODY = (math.inf, "")

NEAR_S = 0.015
"""ρ below which a peer takes its nearest peer's region (s)."""

KEEP_S = 1.5 * NEAR_S
"""ρ up to which peers that already share a region stay together (s), so that jitter moves nobody."""


def derive_regions(
    peers: Iterable[PeerId],
    given: Mapping[PeerId, str],
    measured: Mapping[tuple[PeerId, PeerId], float | None],
    *,
    before: Mapping[PeerId, str] | None = None,
) -> dict[PeerId, str]:
    """Return the region of every peer, the same whatever the order of ``peers``.

    ``measured`` is ρ (s) from the first peer to the second; the mean counts where both ways are known, and a
    pair with neither is far apart. ``given`` regions stand. Peers that shared one in ``before`` keep it as
    long as hops of less than ``KEEP_S`` connect them with each other, and with those who were given that
    region if there are any; where it falls apart, the largest part keeps the name. A peer that was alone is
    placed anew, so regions that were opened before anything was measured grow together; regions of several
    peers never merge. Asked again with its own answer as ``before`` and the same ρ, it answers the same.

    New regions are named after the peer that opened them.
    """
    everyone = sorted(set(peers))
    former = before or {}
    apart = _distances(measured)
    region = {peer: given[peer] for peer in everyone if peer in given}
    for name, group in _groups(everyone, former, region).items():
        core = [peer for peer in region if region[peer] == name]
        kept = _connected(core, group, apart) if core else _largest_part(group, apart)
        if core or len(kept) > 1:
            region.update(dict.fromkeys(kept, name))

    nearest = {
        peer: min(
            ((seconds, other) for other, seconds in apart[peer].items() if other in region), default=NOBODY
        )
        for peer in everyone
        if peer not in region
    }
    # The nearest peer first; entries that a nearer one has overtaken are skipped when they come up.
    queue = [_turn(peer, nearest[peer], former) for peer in nearest]
    heapq.heapify(queue)
    while queue:
        *_, peer, known = heapq.heappop(queue)
        if nearest.get(peer) != known:
            continue
        distance, neighbour = nearest.pop(peer)
        region[peer] = region[neighbour] if distance < NEAR_S else _new_name(peer, former, region)
        for other, seconds in apart[peer].items():
            if other in nearest and (seconds, peer) < nearest[other]:
                nearest[other] = seconds, peer
                heapq.heappush(queue, _turn(other, nearest[other], former))
    return region


def _turn(
    peer: PeerId, nearest: tuple[float, PeerId], former: Mapping[PeerId, str]
) -> tuple[float, bool, PeerId, tuple[float, PeerId]]:
    """When a peer is placed: those near somebody by distance, then the others, known ones first."""
    return min(nearest[0], NEAR_S), peer not in former, peer, nearest


def _distances(
    measured: Mapping[tuple[PeerId, PeerId], float | None],
) -> _Distances:
    """Seconds between two peers that know of each other: the mean of both directions or the known one."""
    apart: _Distances = defaultdict(dict)
    for (one, other), seconds in measured.items():
        if seconds is not None and one != other:
            back = measured.get((other, one))
            apart[one][other] = apart[other][one] = seconds if back is None else (seconds + back) / 2
    return apart


def _groups(
    everyone: Iterable[PeerId], former: Mapping[PeerId, str], given: Mapping[PeerId, str]
) -> dict[str, list[PeerId]]:
    """The peers without a given region by the one they had before, in order of ids."""
    groups: dict[str, list[PeerId]] = defaultdict(list)
    for peer in everyone:
        if peer in former and peer not in given:
            groups[former[peer]].append(peer)
    return groups


def _largest_part(group: Iterable[PeerId], apart: _Distances) -> set[PeerId]:
    """The largest set of peers that hops of less than ``KEEP_S`` connect, of equal ones that of lowest id."""
    parts: list[set[PeerId]] = []
    rest = list(group)
    while rest:
        part = {rest[0]} | _connected(rest[:1], rest[1:], apart)
        parts.append(part)
        rest = [peer for peer in rest if peer not in part]
    return max(parts, key=len)


def _connected(core: Iterable[PeerId], others: Iterable[PeerId], apart: _Distances) -> set[PeerId]:
    """Those of ``others`` whom hops of less than ``KEEP_S`` connect with ``core``."""
    frontier, rest = list(core), set(others)
    reached: set[PeerId] = set()
    while frontier and rest:
        here = frontier.pop()
        near = {peer for peer, seconds in apart[here].items() if peer in rest and seconds < KEEP_S}
        frontier.extend(near)
        reached |= near
        rest -= near
    return reached


def _new_name(peer: PeerId, former: Mapping[PeerId, str], region: Mapping[PeerId, str]) -> str:
    """The name of a region that ``peer`` opens: what it had before, if that is free, else from its id."""
    used = set(region.values())
    if peer in former and former[peer] not in used:
        return former[peer]
    used |= set(former.values())
    name = f"near-{peer[:8]}"
    numbered = (f"{name}-{number}" for number in itertools.count(2))
    return next(free for free in itertools.chain([name], numbered) if free not in used)
