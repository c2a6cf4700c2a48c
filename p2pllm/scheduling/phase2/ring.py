"""The ring of stages of least latency, exactly (Eq 3, with the ring closed).

Layers fall into S *segments* between the bounds where a chain may switch. The recurrence runs over them from
the last to the first. With ``g`` holding the segment that starts at bound ``i``::

    cost[i, g] = work(i, g) + min( cost[i+1, g],  min over g′ of ρ(g, g′) + wait_s(g′) + cost[i+1, g′] )

Past the last segment stands what closes the ring: ``head_s(g) + ρ(g, first)``. The best path thus depends on
its own first stage, and ρ may be claimed lower than it is (``RegionHops``). Both are solved by bounds. One
*pass* over the segments takes a group of first peers, closes the ring to whichever of them is nearest, and so
bounds every ring from below that starts in the group. Where its best path really costs what was claimed, the
group is done. Else what was claimed wrongly is put right: rows of ρ are taken in full, the group is split, by
region and then one by one, and its members that cannot beat the best ring found are left out. Groups come in
order of their bounds, several abreast in one pass of numpy calls; a group's pass counts as one all the same.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from p2pllm.scheduling.phase2.hops import Floats, Hops, Ints

__all__ = ["Problem", "Ring", "Visit", "best_ring"]

PASSES = 64
"""After so many passes the best ring found is returned with its gap (but never none where there is one)."""

_HOP_S = 1e-9
"""Added to each hop while solving, so that rings of equal latency tie-break to fewer stages."""

_ROUNDING_S = 1e-12
"""Costs that differ by less are equal: sums were taken in another order."""

_ABREAST = 8
"""So many groups are solved at once at most, ..."""

_AT_ONCE = 2**13
"""... and only as many as keep the numbers of one step within the cache."""


class Visit(NamedTuple):
    """A stage of a path: a holder, and the segment where it starts."""

    holder: int
    segment: int


@dataclass(frozen=True, slots=True)
class Ring:
    """The visits of a ring in order, and Σ ρ around it; no other ring costs less by more than ``gap_s``."""

    visits: tuple[Visit, ...]
    hops_s: float
    gap_s: float


@dataclass(frozen=True, slots=True)
class Problem:
    """Seconds for H holders to work on S segments, to be reached and to be left; infinite: impossible."""

    work: Floats  # [S, H] seconds for a segment's layers, head included on the last
    wait: Floats  # [H] on arrival
    enter: Floats  # [H] the way from the entry to a first stage, its share per token
    leave: Floats  # [H] the way from a last stage to the entry, likewise
    peer: Ints  # [H] whose it is, by position in ``hops``, ascending
    hops: Hops  # ρ among P peers


@dataclass(frozen=True, slots=True)
class _Solved:
    """What one pass says of F groups: costs from each segment on, and from each bound when hopping there."""

    cost: Floats  # [S, F, H]
    onward: Floats  # [S - 1, F, H]
    first: Floats  # [F, H] the whole ring, by its first holder; infinite outside of the group


def best_ring(problem: Problem, effort: float = math.inf) -> Ring | None:
    """Return the ring of least cost, None when none closes.

    The cost is Σ work + Σ wait_s + Σ ρ + ρ(last, first) + enter(first) + leave(last). No pass begins after
    ``effort`` numbers have been gone through, save to find some ring at all.
    """
    search = _Search(problem)
    search.run(effort)
    if search.best is None:
        return None
    return Ring(search.best, search.hops_s(search.best), search.gap_s())


class _Search:
    """Branch and bound over groups of first peers."""

    def __init__(self, problem: Problem) -> None:
        self.best: tuple[Visit, ...] | None = None
        self.best_cost = math.inf
        self._problem = problem
        self._hops = problem.hops
        self._arrive = problem.wait + _HOP_S
        self._spans = np.flatnonzero(np.diff(problem.peer, prepend=-1))  # where each peer's holders start
        self._has_spans = len(self._spans) < len(problem.peer)
        # The choice between staying and hopping at each bound is within half a hop of the best.
        self._slack = _HOP_S * len(problem.work)
        self._open: list[tuple[float, int, Ints]] = []  # (bound, order of arrival, peers)
        self._arrivals = itertools.count()

    def run(self, effort: float) -> None:
        """Search until the best ring is proven, or passes or effort are used up and there is some ring."""
        can_start = np.logical_or.reduceat(np.isfinite(self._problem.work[0]), self._spans)
        if can_start.any():
            self._push(-math.inf, np.flatnonzero(can_start))
        passes, spent = 0, 0
        while self.gap_s() and ((passes < PASSES and spent < effort) or self.best is None):
            groups = self._next()
            spent += len(groups) * len(self._problem.work) * self._hops.weight
            solved = self._solve(groups)
            for number, group in enumerate(groups):
                self._judge(group, solved, number)
            passes += len(groups)

    def gap_s(self) -> float:
        """Return by how much a ring that is yet to be found might beat the best."""
        return self.best_cost - self._open[0][0] if self._open and self._may_beat(self._open[0][0]) else 0.0

    def _may_beat(self, bound: float) -> bool:
        return bound < self.best_cost - _ROUNDING_S

    def _push(self, bound: float, peers: Ints) -> None:
        heapq.heappush(self._open, (bound, next(self._arrivals), peers))

    def _next(self) -> list[Ints]:
        """Take the groups of least bound that go through one pass together."""
        count = max(1, min(_ABREAST, _AT_ONCE // max(self._hops.weight, len(self._problem.peer))))
        groups: list[Ints] = []
        while len(groups) < count and self.gap_s():
            groups.append(heapq.heappop(self._open)[2])
        return groups

    def _solve(self, groups: Sequence[Ints]) -> _Solved:
        problem, hops = self._problem, self._hops
        segments, holders = problem.work.shape
        cost = np.empty((segments, len(groups), holders))
        onward = np.empty((segments - 1, len(groups), holders))
        # Closing the ring is one more hop, to where nothing is left to do: the first peers.
        inside = np.full((len(groups), len(self._spans)), np.inf)
        for row, group in zip(inside, groups, strict=True):
            row[group] = 0.0
        closing = np.empty_like(inside)
        hops.onward(inside, closing)
        np.minimum(closing, inside, out=closing)
        later = cost[-1]
        np.add(closing.take(problem.peer, axis=1), problem.leave + problem.work[-1], out=later)
        for work, earlier, moved in zip(problem.work[-2::-1], cost[-2::-1], onward[::-1], strict=True):
            self._onward(later + self._arrive, moved)
            np.minimum(later, moved, out=earlier)
            np.add(earlier, work, out=earlier)
            later = earlier
        first = later + (problem.wait + problem.enter)
        return _Solved(cost, onward, first + inside.take(problem.peer, axis=1))

    def _onward(self, after: Floats, out: Floats) -> None:
        """Write the least cost of hopping on from each holder, [F, H], into ``out``."""
        if not self._has_spans:
            self._hops.onward(after, out)
            return
        by_peer = np.minimum.reduceat(after, self._spans, axis=1)
        moved = np.empty_like(by_peer)
        self._hops.onward(by_peer, moved)
        # From one span to another of the same peer there is no way to go.
        np.minimum(moved, by_peer).take(self._problem.peer, axis=1, out=out, mode="clip")

    def _judge(self, group: Ints, solved: _Solved, number: int) -> None:
        """Close a group whose best ring is what was claimed, or put right what was claimed wrongly."""
        first = solved.first[number]
        bound = float(first.min())
        if not self._may_beat(bound):
            return
        path = self._trace(solved, number)
        cost = self._cost(path)
        if cost < self.best_cost:
            self.best, self.best_cost = path, cost
        if cost <= bound + self._slack:
            return
        wrong = {
            source
            for source, target in self._ways(path)
            if self._hops.claimed(source)[target] < self._hops.rho(source, target)
        }
        if wrong:
            self._hops = self._hops.in_full(sorted(wrong))
            self._push(bound, group)
            return
        # All hops were claimed rightly, so the ring was closed to another first peer.
        bounds = np.minimum.reduceat(first, self._spans)
        better = group[bounds[group] < self.best_cost - _ROUNDING_S]
        regions = self._hops.region[better]
        split = regions if (regions != regions[:1]).any() else better
        for part in sorted(set(split.tolist())):
            members = better[split == part]
            self._push(float(bounds[members].min()), members)

    def _trace(self, solved: _Solved, number: int) -> tuple[Visit, ...]:
        """Return the best path of a group."""
        peer = self._problem.peer
        cost, onward = solved.cost[:, number], solved.onward[:, number]
        holder, segment = int(solved.first[number].argmin()), 0
        path = [Visit(holder, segment)]
        while True:
            # On a tie hand over at once: the successor works its whole slice and the wider peer keeps room.
            stays = cost[segment + 1 :, holder] < onward[segment:, holder] - _HOP_S / 2
            if stays.all():
                return tuple(path)
            segment += int(stays.argmin()) + 1
            way = self._hops.claimed(int(peer[holder])).take(peer)
            holder = int((way + (cost[segment] + self._arrive)).argmin())
            path.append(Visit(holder, segment))

    def _cost(self, path: Sequence[Visit]) -> float:
        """Return what a path really costs, hops counted as while solving."""
        problem = self._problem
        ends = [visit.segment for visit in path[1:]] + [len(problem.work)]
        cost = problem.enter[path[0].holder] + problem.leave[path[-1].holder] + (len(path) - 1) * _HOP_S
        for (holder, start), end in zip(path, ends, strict=True):
            cost += problem.wait[holder] + problem.work[start:end, holder].sum()
        return float(cost) + self.hops_s(path)

    def hops_s(self, path: Sequence[Visit]) -> float:
        """Return Σ ρ around a ring, really."""
        return sum(self._hops.rho(source, target) for source, target in self._ways(path))

    def _ways(self, path: Sequence[Visit]) -> Iterator[tuple[int, int]]:
        """Yield (from, to) of the peers around a ring."""
        peers = [int(self._problem.peer[visit.holder]) for visit in path]
        return zip(peers, [*peers[1:], peers[0]], strict=True)
