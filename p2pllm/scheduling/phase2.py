"""Phase 2: the chain of stages that serves a session at the least time per token (Eq 3).

A chain may switch peers only where some slice starts or ends, so the layers fall into *segments* between
those boundaries and the recurrence runs over them from the last to the first. Written backwards, with ``g``
holding the segment that starts at boundary ``i``::

    cost[i, g] = layers(i) · layer_s(g)
                 + min( cost[i+1, g],  min over g′ of ρ(g, g′) + wait_s(g′) + cost[i+1, g′] )

Past the last segment stands what closes the ring: ``head_s(g) + ρ(g, first)``. The best path thus depends on
its own first stage, so the recurrence is solved once per first stage, in order of a lower bound, until the
bound passes the best chain found. That is exact.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from p2pllm.errors import NoRouteError
from p2pllm.scheduling.types import Chain, Holder, PeerId, Rho, Stage

__all__ = ["find_chain", "uncovered"]

_Floats: TypeAlias = npt.NDArray[np.float64]
_Ints: TypeAlias = npt.NDArray[np.intp]

_HOP_S = 1e-9
"""Added to each hop while solving, so that chains of equal latency tie-break to fewer stages."""

_SPREAD = 1.05
"""Upper end of the random factor on τ that spreads entries over near-equal chains."""


def find_chain(
    layers: int,
    holders: Sequence[Holder],
    rho: Rho,
    *,
    entry: PeerId | None = None,
    expected_tokens: int = 128,
    kv_blocks: int = 0,
    excluded: frozenset[PeerId] = frozenset(),
    rng: random.Random | None = None,
) -> Chain:
    """Return the chain over ``[0, layers)`` with the least latency per token.

    Minimised is Σ τ + Σ ρ + ρ(last, first) and, given an ``entry``, also (ρ(entry, first) + ρ(last, entry)) /
    ``expected_tokens``; the chain's ``latency_s`` leaves the entry's share out. Peers in ``excluded``, and
    those known to have fewer than ``kv_blocks`` free, are not used. With ``rng``, each τ is scaled by U(1,
    1.05) while choosing. Stale and leaving peers are the caller's to leave out.

    Raises NoRouteError, with the layer ranges that nobody can serve (none if the peers just cannot reach each
    other).
    """
    usable = [
        holder
        for holder in holders
        if holder.peer not in excluded and (holder.kv_blocks is None or holder.kv_blocks >= kv_blocks)
    ]
    _require_cover(layers, usable, holders)
    bounds = sorted({0, layers} | {b for h in usable for b in (h.start, h.end) if 0 < b < layers})
    problem = _Problem.of(bounds, usable, rho, rng)
    enter, leave = _entry_share(usable, rho, entry, expected_tokens)
    path = _best_path(problem, enter, leave)
    if path is None:
        raise NoRouteError(
            (),
            f"no chain connects the peers that serve layers 0:{layers}: see that they can reach each other",
        )
    return _chain(path, bounds, usable, rho)


@dataclass(frozen=True, slots=True)
class _Problem:
    """Seconds for S segments and H holders to work, to arrive, and to hop; infinite where impossible."""

    work: _Floats  # [S, H] seconds for a segment's layers, head included on the last
    wait: _Floats  # [H]
    hop: _Floats  # [H, H] from row to column
    close: _Floats  # [H, H] ρ alone, the way from the last stage (row) back to the first (column)

    @classmethod
    def of(
        cls, bounds: Sequence[int], holders: Sequence[Holder], rho: Rho, rng: random.Random | None
    ) -> _Problem:
        scale = np.array([rng.uniform(1.0, _SPREAD) if rng else 1.0 for _ in holders])
        layer_s = np.array([h.layer_s for h in holders]) * scale
        head_s = np.array([h.head_s for h in holders]) * scale
        wait_s = np.array([h.wait_s for h in holders]) * scale
        starts = np.array([h.start for h in holders])
        ends = np.array([h.end for h in holders])
        edges = np.array(bounds)
        low, high = edges[:-1, None], edges[1:, None]
        work = np.where((starts <= low) & (high <= ends), (high - low) * layer_s, np.inf)
        work[-1] += head_s
        close = _rho_matrix([h.peer for h in holders], rho)
        return cls(work, wait_s, close + _HOP_S, close)

    def solve(self, end: _Floats) -> tuple[_Floats, _Ints]:
        """Return the cost from layer 0 on for each first holder ([H]), and who comes next ([S-1, H]).

        ``end`` ([H]) is what follows the last segment on each holder.
        """
        cost = self.work[-1] + end
        following = np.empty((len(self.work) - 1, len(end)), dtype=np.intp)
        own = np.arange(len(end))
        for segment in range(len(self.work) - 2, -1, -1):
            moved = self.hop + (self.wait + cost)
            best = np.argmin(moved, axis=1)
            # On a tie hand over at once: the successor works its whole slice and the wider peer keeps room.
            stay = cost < moved[own, best] - _HOP_S / 2
            following[segment] = np.where(stay, own, best)
            cost = self.work[segment] + np.where(stay, cost, moved[own, best])
        return self.wait + cost, following


def _best_path(problem: _Problem, enter: _Floats, leave: _Floats) -> list[int] | None:
    """Return the holder of each segment on the best ring, or None when no ring closes."""
    lower_bound = enter + problem.solve(leave + problem.close.min(axis=1))[0]
    best_cost, best_path = np.inf, None
    for first in np.argsort(lower_bound, kind="stable"):
        if lower_bound[first] >= best_cost:
            break
        costs, following = problem.solve(leave + problem.close[:, first])
        cost = enter[first] + costs[first]
        if cost < best_cost:
            best_cost, best_path = cost, [int(first)]
            for step in following:
                best_path.append(int(step[best_path[-1]]))
    return best_path


def _chain(path: Sequence[int], bounds: Sequence[int], holders: Sequence[Holder], rho: Rho) -> Chain:
    """Return the chain along a path of holders per segment, with its latency by the true, unspread τ."""
    stages: list[Stage] = []
    latency = 0.0
    for segment, index in enumerate(path):
        holder = holders[index]
        start, end = bounds[segment], bounds[segment + 1]
        latency += (end - start) * holder.layer_s
        if segment and path[segment - 1] == index:
            start = stages.pop().start
        else:
            latency += holder.wait_s
        stages.append(Stage(holder.peer, start, end))
    latency += holders[path[-1]].head_s
    ring = zip(stages, [*stages[1:], stages[0]], strict=True)
    latency += sum(_rho(rho, a.peer, b.peer) for a, b in ring)
    return Chain(tuple(stages), latency)


def _rho(rho: Rho, source: PeerId, target: PeerId) -> float:
    """Return ρ with no way as infinity; a peer reaches itself in no time."""
    seconds = 0.0 if source == target else rho(source, target)
    return np.inf if seconds is None else seconds


def _rho_matrix(peers: Sequence[PeerId], rho: Rho) -> _Floats:
    """Return ρ between all holders, [H, H], from row to column; each pair of peers is asked once."""
    unique = sorted(set(peers))
    matrix = np.array([[_rho(rho, a, b) for b in unique] for a in unique])
    rows = np.searchsorted(unique, peers)
    return matrix[np.ix_(rows, rows)]


def _entry_share(
    holders: Sequence[Holder], rho: Rho, entry: PeerId | None, expected_tokens: int
) -> tuple[_Floats, _Floats]:
    """Return what each holder as first or as last stage ([H] each) adds to a token for the entry's sake."""
    if entry is None:
        return np.zeros(len(holders)), np.zeros(len(holders))
    enter = np.array([_rho(rho, entry, h.peer) for h in holders])
    leave = np.array([_rho(rho, h.peer, entry) for h in holders])
    return enter / expected_tokens, leave / expected_tokens


def _require_cover(layers: int, usable: Iterable[Holder], everyone: Iterable[Holder]) -> None:
    """Raise NoRouteError unless every layer has a holder."""
    missing = uncovered(layers, usable)
    if not missing:
        return
    if uncovered(layers, everyone):
        raise NoRouteError(missing)
    ranges = ", ".join(f"{start}:{end}" for start, end in missing)
    raise NoRouteError(
        missing, f"every peer that serves layers {ranges} is full or failed: try again shortly"
    )


def uncovered(layers: int, holders: Iterable[Holder]) -> tuple[tuple[int, int], ...]:
    """Return the ranges within ``[0, layers)`` that no holder covers."""
    gaps: list[tuple[int, int]] = []
    reached = 0
    for start, end in sorted((h.start, h.end) for h in holders):
        if start >= layers:
            break
        if start > reached:
            gaps.append((reached, start))
        reached = max(reached, end)
    if reached < layers:
        gaps.append((reached, layers))
    return tuple(gaps)
