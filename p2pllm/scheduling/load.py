"""Eq 5: how much of the cluster's power stands behind each layer, and where it sends the next peer.

A peer's power is its share of all KV memory and of all FLOP/s. It falls in equal parts on the layers that the
peer holds, so over all layers the loads of a cluster without spares sum to 1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from p2pllm.scheduling.types import Capacity, Offer, PeerId, Slice

__all__ = [
    "ALPHA",
    "coefficient_of_variation",
    "holdable",
    "holder_counts",
    "loads",
    "roomiest_first",
    "spread",
    "window",
]

_Floats: TypeAlias = npt.NDArray[np.float64]
_Ints: TypeAlias = npt.NDArray[np.intp]
_Bools: TypeAlias = npt.NDArray[np.bool_]

ALPHA = 0.5
"""Weight of memory against compute (α)."""


def holder_counts(layers: int, slices: Sequence[Slice]) -> _Ints:
    """How many of ``slices`` hold each layer, [L]; what lies beyond the model counts for nothing."""
    count: _Ints = _holds(layers, slices).sum(axis=0, dtype=np.intp)
    return count


def loads(layers: int, offers: Sequence[Offer], slices: Sequence[Slice], *, alpha: float = ALPHA) -> _Floats:
    """Load(ℓ) of each layer, [L], by Eq 5::

        α · current_kv_size(ℓ) / total_cluster_memory + (1 − α) · current_compute(ℓ) / total_cluster_flops

    ``slices`` are what peers hold, ``offers`` the whole cluster. A peer's KV bytes and FLOP/s are spread over
    the layers that it holds, whether in one slice or in several. A total of zero makes its term zero.

    Raises ValueError for a slice of a peer without an offer.
    """
    power = _power(offers, alpha)
    strangers = {piece.peer for piece in slices} - power.keys()
    if strangers:
        raise ValueError(f"peer {min(strangers)} holds a slice but offers nothing")
    # Summed in one order whatever the caller's, so that rounding cannot make two leaders disagree.
    slices = sorted(slices, key=lambda piece: (piece.peer, piece.start))
    held: Counter[PeerId] = Counter()
    for piece in slices:
        held[piece.peer] += piece.end - piece.start
    each = np.array([power[piece.peer] / held[piece.peer] for piece in slices])
    loads: _Floats = np.where(_holds(layers, slices), each[:, None], 0.0).sum(axis=0)
    return loads


def coefficient_of_variation(loads: _Floats) -> float:
    """Standard deviation ÷ mean of the layers' loads, [L]; 0 where there is no load at all."""
    mean = float(loads.mean())
    return float(loads.std()) / mean if mean > 0 else 0.0


def holdable(layers: int, capacity: Capacity) -> range:
    """The layers that a peer could hold in some slice: all but ends for which it has no room."""
    if capacity.both >= layers:
        return range(layers)
    if layers == 1 or not capacity.middle:
        return range(0)
    return range(0 if capacity.first else 1, layers if capacity.last else layers - 1)


def window(layers: int, capacity: Capacity, lightest: int) -> tuple[int, int] | None:
    """The slice ``[start, end)`` that a newcomer takes: from the lightest layer on, as far as it has room.

    Where room goes beyond the model's end the slice starts earlier, s = min(lightest, L − c), and a peer with
    room for the whole model takes it all. A slice with layer 0, layer L − 1 or both holds only as many layers
    as ``capacity`` says for that place. A peer that cannot hold the lightest layer takes the slice nearest to
    it; None when it cannot hold any.
    """
    if capacity.both >= layers:
        return 0, layers
    first = min(capacity.first, layers - 1)
    inner = min(capacity.middle, layers - 2)
    last = min(capacity.last, layers - 1)
    start = max(1, min(lightest, layers - 1 - inner))
    places = [(0, first), (start, start + inner), (layers - last, layers)]

    def rank(place: tuple[int, int]) -> tuple[int, int, int]:
        start, end = place
        distance = max(start - lightest, lightest - (end - 1), 0)
        return distance, -start, -end

    return min((place for place in places if place[0] < place[1]), key=rank, default=None)


def roomiest_first(offers: Iterable[Offer]) -> list[Offer]:
    """Offers by capacity, the biggest first, equal ones by peer id."""
    return sorted(sorted(offers, key=lambda offer: offer.peer), key=lambda o: o.capacity, reverse=True)


def spread(
    layers: int, offers: Sequence[Offer], placed: Sequence[Slice], *, alpha: float = ALPHA
) -> tuple[Slice, ...]:
    """Let every spare join where the layers are lightest; nobody who is placed moves.

    ``offers`` are the whole cluster; those without a slice in ``placed`` are the spares, and join roomiest
    first. Each takes the ``window`` at the lightest layer that it can hold, by the loads (Eq 5) that those
    before it left. Equal loads go to the layer with fewer holders, then to the lower one, so layers without
    any holder always come first. Spares that can hold nothing are left out.

    A scan for the lightest layer stands where a min-heap could: a join changes the loads of a whole slice, so
    a heap would see dozens of updates for each look.

    Raises ValueError for a placed peer without an offer.
    """
    load, holders = loads(layers, offers, placed, alpha=alpha), holder_counts(layers, placed)
    power = _power(offers, alpha)
    busy = {piece.peer for piece in placed}
    joined: list[Slice] = []
    for offer in roomiest_first(offer for offer in offers if offer.peer not in busy):
        able = holdable(layers, offer.capacity)
        if not able:
            continue
        low, high = able.start, able.stop
        lightest = low + int(np.lexsort((holders[low:high], load[low:high]))[0])
        span = window(layers, offer.capacity, lightest)
        if span is None:
            continue
        start, end = span
        load[start:end] += power[offer.peer] / (end - start)
        holders[start:end] += 1
        joined.append(Slice(offer.peer, start, end))
    return tuple(joined)


def _power(offers: Sequence[Offer], alpha: float) -> dict[PeerId, float]:
    """Each peer's part of the cluster: α of its memory, 1 − α of its compute."""
    memory = sum(offer.kv_bytes for offer in offers) or 1
    flops = math.fsum(offer.flops for offer in offers) or 1.0
    return {o.peer: alpha * o.kv_bytes / memory + (1 - alpha) * o.flops / flops for o in offers}


def _holds(layers: int, slices: Sequence[Slice]) -> _Bools:
    """Whether each slice has each layer, [S, L]."""
    starts = np.array([piece.start for piece in slices], dtype=np.intp)
    ends = np.array([piece.end for piece in slices], dtype=np.intp)
    layer = np.arange(layers)
    holds: _Bools = (starts[:, None] <= layer) & (layer < ends[:, None])
    return holds
