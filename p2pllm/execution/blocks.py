"""Which blocks of the KV cache are taken, and which are free: numbers only, the memory is elsewhere.

A block is 16 tokens of one layer. Blocks of many layers are taken together, under one number that is free in
all of them, so that one table serves all layers of a session (the paging of vLLM, Kwon et al. 2023).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from p2pllm.errors import BusyError

__all__ = ["BLOCK_TOKENS", "BlockPool", "are_in_a_row", "blocks_for", "outputs_layer", "slots_of"]

BLOCK_TOKENS = 16
"""Tokens in a block."""
_ROOM = 16
"""Blocks left free between sessions while there is space, so that they can grow and stay in one piece."""


def blocks_for(tokens: int, layers: int = 1) -> int:
    """Blocks that hold ``tokens`` tokens of ``layers`` layers."""
    return -(-tokens // BLOCK_TOKENS) * layers


def slots_of(table: NDArray[np.int64], begin: int, end: int) -> NDArray[np.int64]:
    """Where the tokens at positions [begin, end) are in a slab, for a session with the blocks ``table``."""
    positions = np.arange(begin, end)
    slots: NDArray[np.int64] = table[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
    return slots


def are_in_a_row(blocks: list[int]) -> bool:
    """Whether blocks follow each other in memory."""
    return blocks == list(range(blocks[0], blocks[0] + len(blocks)))


def outputs_layer(end: int, layers: int) -> int | None:
    """What stands among the numbers of a model's ``layers`` layers for the outputs of those that run to
    ``end``, kept in blocks like keys and values; None where nothing is kept, as the last stage sends none.
    """
    return layers + end if end < layers else None


class BlockPool:
    """A number of blocks, some of them taken. For the event loop's thread.

    ``free`` is negative while sessions have more than a pool that was made smaller.
    """

    def __init__(self, blocks: int = 0, layers: int = 1) -> None:
        """A pool of ``blocks`` blocks in all, for layers in which a block counts as ``layers`` together."""
        self.total = blocks
        self.free = blocks
        self.costs: dict[int, int] = {}
        """How many a block of a layer counts as, where that is not one."""
        self._layers = layers
        self._taken: NDArray[np.bool_] = np.zeros((0, 0), dtype=np.bool_)

    def resize(self, blocks: int, layers: int) -> None:
        """Have ``blocks`` in all from now on, see `BlockPool`; nobody loses what is taken."""
        self.free += blocks - self.total
        self.total, self._layers = blocks, layers

    def cost(self, layers: Iterable[int]) -> int:
        """How many a block of all these layers counts as."""
        return sum(self.costs.get(layer, 1) for layer in layers)

    def take(self, layers: Sequence[int], count: int, *, after: int | None = None) -> NDArray[np.int64]:
        """Take ``count`` blocks of each of ``layers``; returns their numbers, in a row where that can be.

        ``after`` is the block that they best follow. Raises `BusyError`, taking none, if there are too few.
        """
        wanted = self.cost(layers) * count
        if wanted > self.free:
            raise BusyError(
                f"KV cache is full: {wanted} blocks wanted, {max(0, self.free)} of {self.total} free"
            )
        self._widen(max(layers) + 1, 0)
        numbers = self._find(layers, count, after)
        if count:
            self._widen(0, int(numbers.max()) + 1)
            self._taken[np.array(layers)[:, None], numbers] = True
        self.free -= wanted
        return numbers

    def give(self, layers: Sequence[int], numbers: Collection[int]) -> None:
        """Put blocks back that were taken for these ``layers``."""
        self._taken[np.array(layers)[:, None], np.fromiter(numbers, np.int64, len(numbers))] = False
        self.free += self.cost(layers) * len(numbers)

    def heights(self) -> dict[int, int]:
        """For each layer in use, one more than the highest number of a block that is taken in it."""
        used = ((layer, np.flatnonzero(taken)) for layer, taken in enumerate(self._taken))
        return {layer: int(numbers[-1]) + 1 for layer, numbers in used if len(numbers)}

    def _find(self, layers: Sequence[int], count: int, after: int | None) -> NDArray[np.int64]:
        _, width = self._taken.shape
        reach = count + 2 * _ROOM
        free = np.ones(width + reach, dtype=np.bool_)
        free[:width] = ~self._taken[list(layers)].any(axis=0)
        if after is not None and free[after + 1 : after + 1 + count].all() and after + count < len(free):
            return np.arange(after + 1, after + 1 + count)
        # Past what all layers would share evenly only if nothing else is left.
        near = free[: max(width, min(width + reach, self.total // max(1, self._layers)))]
        edges = np.flatnonzero(np.diff(near, prepend=False, append=False))
        starts, lengths = edges[::2], edges[1::2] - edges[::2]
        for room in (_ROOM, 0):
            fits = np.flatnonzero(lengths >= count + 2 * room)
            if len(fits):
                first = int(starts[fits[0]])
                first += room if first else 0
                return np.arange(first, first + count)
        return np.flatnonzero(free)[:count]

    def _widen(self, layers: int, numbers: int) -> None:
        rows, columns = self._taken.shape
        if layers > rows or numbers > columns:
            wider = np.zeros((max(layers, rows), max(numbers, columns)), dtype=np.bool_)
            wider[:rows, :columns] = self._taken
            self._taken = wider
