"""Keys and values in memory: for each layer a slab of blocks, in which every session has some.

A slab is (KV heads, slots, dim) with 16 slots to a block. Outputs that are kept have slabs too, under numbers
that no layer has: (1, slots, hidden). A slab is as long as the blocks in use want it and is made longer by
half as much again or more, while there is memory to spare, so memory follows use and stays in the budget.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from p2pllm.execution.blocks import BLOCK_TOKENS, blocks_for

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Copy", "KvStore", "SessionCache", "Tables", "Target", "private_caches"]

Tables = Mapping[int | None, NDArray[np.int64]]
"""For the layers of each window (None: those that see everything), the block of each 16 tokens; -1: none."""
Copy = tuple[tuple[int, ...], int, int]
"""Layers, a block to copy in them, and the one to copy it to."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where new keys and values go: the ``slots`` (tokens,) of slabs of at least ``blocks`` blocks.

    ``cleared`` slots are set to zero: those after a session's last token in a block it has just entered. What
    another session left there has no weight, but if it is not a number, it would be felt all the same.
    """

    slots: Tensor | slice
    cleared: Tensor | None
    blocks: int


class KvStore:
    """The slabs of all layers. For the thread that takes steps."""

    def __init__(self) -> None:
        self._slabs: dict[int, tuple[Tensor, ...]] = {}
        self._scratch: dict[int, Tensor] = {}
        self.windows: dict[int, int | None] = {}
        """How far back each layer sees, as its attention said when it last ran."""
        self.most_bytes = sys.maxsize
        """All that slabs may have, beyond what blocks in use want."""

    def token_bytes(self, layers: Iterable[int]) -> int:
        """Bytes of one token in the largest of these layers, which are here."""
        slabs = (self._slabs[layer] for layer in layers)
        return max(sum(t.shape[0] * t.shape[2] * t.element_size() for t in slab) for slab in slabs)

    def write(self, layer: int, target: Target, *rows: Tensor) -> tuple[Tensor, ...]:
        """Put keys and values, both (KV heads, tokens, dim), where ``target`` says; returns the slabs."""
        slab = self._slabs.get(layer)
        if slab is None or slab[0].shape[1] < target.blocks * BLOCK_TOKENS:
            slab = self._slabs[layer] = self._grown(slab, target.blocks, *rows)
        for tensor, new in zip(slab, rows, strict=True):
            if isinstance(target.slots, slice):
                tensor[:, target.slots] = new
            else:
                tensor.index_copy_(1, target.slots, new)
            if target.cleared is not None:
                tensor.index_fill_(1, target.cleared, 0)
        return slab

    def read(self, layer: int, slots: Tensor) -> Tensor:
        """A copy of what lies in these ``slots`` of the first slab of a layer: (heads, slots, dim)."""
        return self._slabs[layer][0].index_select(1, slots.to(self._slabs[layer][0].device))

    def scratch(self, like: Tensor, shape: tuple[int, ...], which: int) -> Tensor:
        """Memory of this shape and of the type of ``like``, until the next call with the same ``which``.

        Fresh memory for large copies would cost more than the copies.
        """
        size = prod(shape)
        buffer = self._scratch.get(which)
        if buffer is None or buffer.numel() < size or buffer.dtype != like.dtype:
            buffer = self._scratch[which] = like.new_empty(size + size // 2)
        return buffer[:size].view(shape)

    def copy(self, copy: Copy) -> None:
        """Copy a block in the slabs of some layers."""
        layers, source, target = copy
        blocks = max(source, target) + 1
        for layer in layers:
            if layer in self._slabs:
                slab = self._slabs[layer]
                if slab[0].shape[1] < blocks * BLOCK_TOKENS:
                    slab = self._slabs[layer] = self._grown(slab, blocks, *slab)
                for tensor in slab:
                    tensor[:, _slots(target)] = tensor[:, _slots(source)]

    def retain(self, heights: Mapping[int, int]) -> None:
        """Free the memory of all layers but these, and theirs past the given number of blocks."""
        self._scratch.clear()
        for layer in list(self._slabs):
            slots = heights.get(layer, 0) * BLOCK_TOKENS
            if slots == 0:
                del self._slabs[layer]
            elif slots < self._slabs[layer][0].shape[1]:
                self._slabs[layer] = tuple(tensor[:, :slots].clone() for tensor in self._slabs[layer])

    def _grown(self, old: tuple[Tensor, ...] | None, blocks: int, *like: Tensor) -> tuple[Tensor, ...]:
        had = 0 if old is None else old[0].shape[1]
        held = sum(tensor.nbytes for slab in self._slabs.values() for tensor in slab)
        block_bytes = BLOCK_TOKENS * sum(rows.shape[0] * rows.shape[2] * rows.element_size() for rows in like)
        spare = max(0, self.most_bytes - held) // (block_bytes * max(1, len(self._slabs)))  # others grow too
        slots = max(blocks * BLOCK_TOKENS, had + min(had // 2 // BLOCK_TOKENS, spare) * BLOCK_TOKENS)
        new = tuple(rows.new_empty(rows.shape[0], slots, rows.shape[2]) for rows in like)
        for tensor, before in zip(new, old or (), strict=False):
            tensor[:, :had] = before
        return new


class SessionCache:
    """One session's place in a store.

    ``tables`` are replaced when they change, never altered: work keeps those that it was queued with.
    """

    __slots__ = ("copies", "length", "store", "tables")

    def __init__(self, store: KvStore, tables: Tables, length: int = 0) -> None:
        self.store = store
        self.tables = tables
        self.length = length
        """Tokens whose keys and values are there, in all layers."""
        self.copies: list[Copy] = []
        """Blocks to copy before any work."""

    def catch_up(self) -> None:
        """Make the copies that are to be made. For the thread that takes steps."""
        while self.copies:
            self.store.copy(self.copies.pop())


def private_caches(tokens: Sequence[int]) -> list[SessionCache]:
    """Caches for sessions of at most so many tokens each, in a store of their own."""
    store = KvStore()
    ends = np.cumsum([blocks_for(count) for count in tokens])
    return [SessionCache(store, {None: numbers}) for numbers in np.split(np.arange(ends[-1]), ends[:-1])]


def _slots(block: int) -> slice:
    return slice(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)
