"""What a search needs and no record changes each second: who holds what, in which order, and how far apart.

**Where a chain may switch.** For a given order of stages the cost is linear in each switch point, so a switch
slides until it reaches the end of a slice, or until a stage is down to one layer. A stage of one layer that
starts or ends inside its neighbour's slice is only a relay: to hand its layer to that neighbour saves a wait
and puts one hop in the place of two. Where no detour is shorter than the direct way (``Hops.straight``) this
never costs more, and slice bounds suffice, together with 1 and L - 1: at the ends of the ring such a stage
may also pay for its head or for being near the entry. Else every layer is a bound. Both are exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from p2pllm.scheduling.phase2.hops import Floats, Hops, Ints
from p2pllm.scheduling.phase2.mesh import Mesh
from p2pllm.scheduling.phase2.vertices import Rows
from p2pllm.scheduling.types import PeerId

__all__ = ["Layout", "lay_out"]


class Layout(NamedTuple):
    """H spans of P peers over S segments between bounds."""

    order: Ints  # [H] the rows, region by region and the spans of a peer together
    peers: Ints  # [P] their numbers
    position: Ints  # [H] whose span it is, by place in ``peers``
    hops: Hops  # among the P peers
    bounds: Ints  # [S + 1] layers from 0 to L where a chain may switch
    away: Floats  # [S, H] 0 where a span has a segment, else infinite


def lay_out(
    layers: int, mesh: Mesh, rows: Rows, fixed: int, severed: Iterable[tuple[PeerId, PeerId]]
) -> Layout:
    """Return the layout of ``rows``, of which the first ``fixed`` have their layers to themselves.

    There are no ``severed`` hops (from, to) in it.
    """
    order = np.lexsort((rows["peer"], mesh.regions(rows["peer"])))
    peer, start, end = (rows[name][order] for name in ("peer", "start", "end"))
    is_next = np.diff(peer, prepend=-1) != 0
    hops = mesh.hops(peer[is_next], severed)
    bounds = _bounds(layers, start, end) if hops.straight else np.arange(layers + 1)
    has = (start <= bounds[:-1, None]) & (bounds[1:, None] <= end)
    is_fixed = order < fixed
    has &= is_fixed | ~has[:, is_fixed].any(axis=1, keepdims=True)
    return Layout(order, peer[is_next], np.cumsum(is_next) - 1, hops, bounds, np.where(has, 0.0, np.inf))


def _bounds(layers: int, *edges: npt.NDArray[np.intp]) -> Ints:
    is_bound = np.zeros(layers + 1, dtype=bool)
    is_bound[[0, 1, -2, -1]] = True
    for edge in edges:
        is_bound[np.minimum(edge, layers)] = True
    return np.flatnonzero(is_bound)
