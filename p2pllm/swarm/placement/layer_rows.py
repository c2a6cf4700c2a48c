"""Sets of layers as rows of truth values."""

from __future__ import annotations

from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from p2pllm.records import Span, SpanState
from p2pllm.scheduling import Slice

__all__ = ["Row", "row_of", "spans"]

Row: TypeAlias = npt.NDArray[np.bool_]
"""Whether each layer belongs to a set, [L]."""

_STATES: tuple[SpanState | None, ...] = (None, "ready", "draining", "loading")


def row_of(layers: int, *slices: Slice | None) -> Row:
    """The layers of some slices of a model of so many layers."""
    row = np.zeros(layers, dtype=np.bool_)
    for piece in slices:
        if piece is not None:
            row[piece.start : piece.end] = True
    return row


def spans(held: Row, loading: Row, draining: Row) -> tuple[Span, ...]:
    """What a record says of layers that are held, loading, and of those held that are to be dropped."""
    codes = np.where(loading, 3, np.where(held, 1 + draining.astype(np.intp), 0))
    edges = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(codes)]
    return tuple(
        Span(start, end, state)
        for start, end in pairwise(edges)
        if (state := _STATES[int(codes[start])]) is not None
    )
