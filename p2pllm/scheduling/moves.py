"""Make before break: which peers may go from what they hold to what a plan gives them, now.

A peer may load while everything that it holds fits beside it, and may drop only layers that another peer
holds ready. Called again whenever peers have finished what they started, this leads step by step to the plan
without ever uncovering a layer; each step brings some peer nearer to its slice and none further away, so it
ends. What cannot be reached that way is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from p2pllm.scheduling.types import Capacity, PeerId, Slice

__all__ = ["Moves", "runs", "safe_moves"]

_Row: TypeAlias = npt.NDArray[np.bool_]  # [L]


@dataclass(frozen=True, slots=True)
class Moves:
    """What peers may do at once, all of it at the same time.

    ``load`` and ``drop`` name only the layers that come and go: what a peer keeps is never reloaded.
    ``blocked`` are slices of the plan that cannot be started: another peer's step may free them, and when
    ``load`` and ``drop`` are empty, they are stuck.
    """

    load: tuple[Slice, ...]
    drop: tuple[Slice, ...]
    blocked: tuple[Slice, ...]


def safe_moves(
    layers: int,
    held: Sequence[Slice],
    target: Sequence[Slice],
    capacities: Mapping[PeerId, Capacity],
    *,
    force: bool = False,
) -> Moves:
    """Return what may start on the way from ``held`` to ``target`` without uncovering any layer.

    ``held`` are the ready slices of peers that stay (several per peer while it moves), ``target`` one slice
    for each peer that the plan moves or leaves where it is; peers without one just keep what they hold.
    ``capacities`` has every peer of ``target``.

    A peer for which old and new fit together loads first and drops later. One for which they do not may drop
    first, but only when another ready holder remains for every layer that it gives up; so two full sole
    holders cannot swap. ``force`` lets these drop too, which breaks the swarm until they have loaded: for an
    operator who says so, or where the swarm serves nobody anyway. Of several peers that could drop the same
    layers, the highest id does.
    """
    goals = {piece.peer: piece for piece in target}
    has = {peer: np.zeros(layers, dtype=np.bool_) for peer in goals.keys() | {piece.peer for piece in held}}
    for piece in held:
        has[piece.peer][piece.start : piece.end] = True
    ready = np.zeros(layers, dtype=np.intp)
    for row in has.values():
        ready += row
    load: list[Slice] = []
    drop: list[Slice] = []
    blocked: list[Slice] = []
    for peer in sorted(goals, reverse=True):
        goal = np.zeros(layers, dtype=np.bool_)
        goal[goals[peer].start : goals[peer].end] = True
        missing, surplus = goal & ~has[peer], has[peer] & ~goal
        if missing.any() and _fits(capacities[peer], has[peer] | goal):
            load.extend(_slices(peer, missing))
        elif missing.any() and not _fits(capacities[peer], goal):
            blocked.append(goals[peer])
        elif (ready[surplus] > 1).all() or (force and missing.any()):
            ready[surplus] -= 1
            drop.extend(_slices(peer, surplus))
        elif missing.any():
            blocked.append(goals[peer])
    return Moves(tuple(load), tuple(drop), tuple(blocked))


def _fits(capacity: Capacity, row: _Row) -> bool:
    """Whether a peer has room for these layers, with embedding and head where they belong."""
    return int(row.sum()) <= capacity.at(is_first=bool(row[0]), is_last=bool(row[-1]))


def _slices(peer: PeerId, row: _Row) -> list[Slice]:
    return [Slice(peer, *run) for run in runs(row)]


def runs(row: _Row) -> list[tuple[int, int]]:
    """The ranges [start, end) that the layers of a row, [L] of truth values, fall into, in order."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], row, [False]))))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]
