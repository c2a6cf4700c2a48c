"""Sets of layers as rows of truth values."""

from __future__ import annotations

from itertools import groupby
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from p2pllm.records import Span, SpanState
from p2pllm.scheduling import Slice

__all__ = ["Row", "row_of", "spans"]

Row: TypeAlias = npt.NDArray[np.bool_]
"""Whether each layer belongs to a set, [L]."""


def row_of(layers: int, *slices: Slice | None) -> Row:
    """The layers of some slices of a model of so many layers."""
    row = np.zeros(layers, dtype=np.bool_)
    for piece in slices:
        if piece is not None:
            row[piece.start : piece.end] = True
    return row


def spans(held: Row, loading: Row, draining: Row) -> tuple[Span, ...]:
    """What a record says of layers that are held, loading, and of those held that are to be dropped."""
    states = map(_state, held.tolist(), loading.tolist(), draining.tolist())
    found: list[Span] = []
    end = 0
    for state, run in groupby(states):
        start, end = end, end + len(list(run))
        if state is not None:
            found.append(Span(start, end, state))
    return tuple(found)


def _state(held: bool, loading: bool, draining: bool) -> SpanState | None:
    if loading:
        return "loading"
    if not held:
        return None
    return "draining" if draining else "ready"
