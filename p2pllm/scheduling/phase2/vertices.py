"""The spans that peers hold, one row each, changed one peer at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from p2pllm.scheduling.types import Holder

__all__ = ["Rows", "Vertices"]

_ROW = np.dtype(
    [
        ("peer", np.intp),  # its number, -1 in a row that is free
        ("start", np.intp),
        ("end", np.intp),
        ("layer_s", np.float64),
        ("head_s", np.float64),
        ("wait_s", np.float64),
        ("kv_blocks", np.float64),  # infinite where unknown, which never rules a peer out
        ("heard_s", np.float64),
    ]
)

Rows: TypeAlias = npt.NDArray[np.void]
"""Records with the fields of a ``Holder``, the peer by number."""


class Vertices:
    """A table of ``Holder`` values; peers go by number."""

    def __init__(self) -> None:
        self._table: Rows = np.zeros(8, dtype=_ROW)
        self._table["peer"] = -1
        self._free = list(range(7, -1, -1))
        self._rows: dict[int, list[int]] = {}  # by number of the peer
        self._ranges: dict[int, list[tuple[int, int]]] = {}

    def put(self, peer: int, holders: Iterable[Holder]) -> bool:
        """Say all that a peer holds now, none to forget it; True if it is not the same layers as before.

        Leaving spans are no vertices. Raises ValueError for empty spans and for times that are negative or
        not finite.
        """
        held = [holder for holder in holders if not holder.leaving]
        values = [_row(peer, holder) for holder in held]
        rows, before = self._rows.pop(peer, []), self._ranges.pop(peer, [])
        for row in rows[len(values) :]:
            self._table[row]["peer"] = -1
            self._free.append(row)
        del rows[len(values) :]
        while len(rows) < len(values):
            rows.append(self._new())
        for row, value in zip(rows, values, strict=True):
            self._table[row] = value
        ranges = [(holder.start, holder.end) for holder in held]
        if rows:
            self._rows[peer], self._ranges[peer] = rows, ranges
        return before != ranges

    def of(self, peer: int) -> Rows:
        """Return a copy of the rows of one peer."""
        return self._table[self._rows.get(peer, [])]

    def all(self) -> Rows:
        """Return a copy of the rows of all peers; the same in the same order until ``put`` says otherwise."""
        return self._table[self._table["peer"] >= 0]

    def _new(self) -> int:
        if not self._free:
            old = len(self._table)
            self._table = np.concatenate((self._table, np.zeros(old, dtype=_ROW)))
            self._table["peer"][old:] = -1
            self._free = list(range(2 * old - 1, old - 1, -1))
        return self._free.pop()


def _row(peer: int, holder: Holder) -> tuple[Any, ...]:
    if not 0 <= holder.start < holder.end:
        raise ValueError(f"peer {holder.peer}: {holder.start}:{holder.end} is no range of layers")
    if not all(0 <= seconds < math.inf for seconds in (holder.layer_s, holder.head_s, holder.wait_s)):
        raise ValueError(f"peer {holder.peer}: times must be 0 or more seconds, and finite")
    blocks = math.inf if holder.kv_blocks is None else holder.kv_blocks
    return (
        peer,
        holder.start,
        holder.end,
        holder.layer_s,
        holder.head_s,
        holder.wait_s,
        blocks,
        holder.heard_s,
    )
