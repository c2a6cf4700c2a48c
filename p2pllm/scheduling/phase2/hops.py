"""ρ among the peers of one search, laid out so that the best next hop of all of them is a few numpy calls.

Both layouts answer the same question for F searches abreast: given what everything costs from each peer on,
``after[F, P]``, what does it cost from each peer when it first hops on::

    onward[f, p] = min over q of ρ(p, q) + after[f, q]

``DenseHops`` keeps the whole matrix. ``RegionHops`` keeps what is typical between R regions, and the measured
pairs beside it, so that 4096 peers need no 4096² numbers. It *claims* the typical ρ also for pairs that were
measured to be further apart. That never claims too much, so ``onward`` is a lower bound; the row of a peer
for which this turns out to matter is then taken in full.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["DenseHops", "Floats", "Hops", "Ints", "Pairs", "RegionHops"]

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.intp]

_CUBE = 32
"""Up to this many places it is checked whether a detour can be shorter; beyond, it is taken for granted."""


class Pairs(NamedTuple):
    """E measured pairs of peers, by position: [E] each; infinite seconds are no edge."""

    source: Ints
    target: Ints
    seconds: Floats


class Hops(Protocol):
    """ρ among P peers."""

    straight: bool
    """Surely no way through a third peer is shorter than the direct one."""

    region: Ints
    """[P] numbers that group peers which are alike in where they are."""

    weight: int
    """How many numbers one ``onward`` goes through."""

    def onward(self, after: Floats, out: Floats) -> None:
        """Write the least claimed cost of hopping on, [F, P], into ``out``, from ``after``, [F, P]."""

    def claimed(self, source: int) -> Floats:
        """Return the claimed ρ from a peer to each, [P]; 0 to itself."""

    def rho(self, source: int, target: int) -> float:
        """Return the true ρ, infinite where there is no edge."""

    def in_full(self, sources: Sequence[int]) -> Hops:
        """Return the same with the true ρ claimed from these peers to each."""


class DenseHops:
    """All of ρ, ``matrix`` [P, P] from row to column, with zeros on the diagonal."""

    def __init__(self, matrix: Floats, region: Ints) -> None:
        self.straight = _is_straight(matrix)
        self.region = region
        self.weight = matrix.size
        self._matrix = matrix
        self._matrix_to = np.ascontiguousarray(matrix.T)

    def onward(self, after: Floats, out: Floats) -> None:
        """Write the least cost of hopping on."""
        np.minimum.reduce(self._matrix_to + after[:, :, None], axis=1, out=out)

    def claimed(self, source: int) -> Floats:
        """Return the row of a peer."""
        row: Floats = self._matrix[source]
        return row

    def rho(self, source: int, target: int) -> float:
        """Return one number of the matrix."""
        return float(self._matrix[source, target])

    def in_full(self, sources: Sequence[int]) -> DenseHops:  # noqa: ARG002
        """Return the same: what is claimed is true."""
        return self


class RegionHops:
    """``typical`` ρ [R, R] between regions, and measured pairs that override it.

    ``region`` [P] ascends from 0 to R - 1, each of them present.
    """

    def __init__(self, typical: Floats, region: Ints, pairs: Pairs) -> None:
        self.straight = not len(pairs.source) and _is_straight(typical)
        self.region = region
        self._typical = typical
        self._typical_to = np.ascontiguousarray(typical.T)
        self._starts = np.flatnonzero(np.diff(region, prepend=-1))
        self._pairs = pairs
        # Pairs that are nearer than typical, as W targets for each peer, [W, P]. Peers with more of them are
        # taken in full, and W makes least work of both.
        peers = len(region)
        near = pairs.seconds < typical[region[pairs.source], region[pairs.target]]
        source, target, seconds = (column[near] for column in pairs)
        count = np.bincount(source, minlength=peers)
        with_more = peers - np.cumsum(np.bincount(count, minlength=1))
        width = int((np.arange(len(with_more)) + with_more).argmin())
        order = np.argsort(source.astype(np.min_scalar_type(peers)), kind="stable")
        place = np.arange(len(order)) - np.repeat(np.cumsum(count) - count, count)
        kept = order[place < width]
        self._targets = np.tile(np.arange(peers), (width, 1))
        self._seconds = np.full((width, peers), np.inf)
        self._targets[place[place < width], source[kept]] = target[kept]
        self._seconds[place[place < width], source[kept]] = seconds[kept]
        self._full = np.flatnonzero(count > width).tolist()
        self._full_rows = np.array([self._row(peer) for peer in self._full]).reshape(len(self._full), peers)
        self._weigh()

    def onward(self, after: Floats, out: Floats) -> None:
        """Write the least claimed cost of hopping on."""
        nearest = np.minimum.reduceat(after, self._starts, axis=1)
        by_region = np.minimum.reduce(self._typical_to + nearest[:, :, None], axis=1)
        by_region.take(self.region, axis=1, out=out, mode="clip")  # the mode that needs no buffer
        if len(self._targets):
            by_pair = after.take(self._targets, axis=1)
            by_pair += self._seconds
            np.minimum(out, np.minimum.reduce(by_pair, axis=1), out=out)
        if self._full:
            out[:, self._full] = np.minimum.reduce(self._full_rows + after[:, None, :], axis=2)

    def claimed(self, source: int) -> Floats:
        """Return the claimed ρ from a peer to each."""
        row: Floats
        if source in self._full:
            row = self._full_rows[self._full.index(source)]
        else:
            row = self._typical[self.region[source]].take(self.region)
            targets = self._targets[:, source]
            row[targets] = np.minimum(row[targets], self._seconds[:, source])
            row[source] = 0.0
        return row

    def rho(self, source: int, target: int) -> float:
        """Return the true ρ."""
        return float(self._row(source)[target])

    def in_full(self, sources: Sequence[int]) -> RegionHops:
        """Return the same with more rows in full."""
        fuller = copy.copy(self)
        fuller._full = [*self._full, *sources]
        fuller._full_rows = np.vstack((self._full_rows, *(self._row(source) for source in sources)))
        fuller._weigh()
        return fuller

    def _weigh(self) -> None:
        parts = self.region, self._typical, self._targets, self._full_rows
        self.weight = sum(part.size for part in parts)

    def _row(self, source: int) -> Floats:
        row: Floats = self._typical[self.region[source]].take(self.region)
        measured = self._pairs.source == source
        row[self._pairs.target[measured]] = self._pairs.seconds[measured]
        row[source] = 0.0
        return row


def _is_straight(matrix: Floats) -> bool:
    """Return whether surely no detour is shorter, [P, P] or between regions [R, R]."""
    if len(matrix) > _CUBE:
        return False
    detours = np.minimum.reduce(matrix[:, :, None] + matrix, axis=1, initial=np.inf)
    return bool((detours >= matrix).all())
