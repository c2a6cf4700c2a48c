"""Keys and values in memory: for each layer a slab of blocks, in which every session has some.

A slab is (KV heads, slots, dim) with 16 slots to a block. It is as long as the blocks in use want it and is
made longer by half as much again or more, so memory follows use and not the budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from p2pllm.execution.blocks import BLOCK_TOKENS

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
        self._slabs: dict[int, tuple[Tensor, Tensor]] = {}
        self._scratch: dict[int, Tensor] = {}
        self.windows: dict[int, int | None] = {}
        """How far back each layer sees, as its attention said when it last ran."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in the largest layer that is here."""
        return max(
            (sum(t.shape[0] * t.shape[2] * t.element_size() for t in slab) for slab in self._slabs.values()),
            default=0,
        )

    def write(
        self,
        layer: int,
        target: Target,
        keys: Tensor,
        values: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Put keys and values, both (KV heads, tokens, dim), where ``target`` says; returns the slabs."""
        slab = self._slabs.get(layer)
        if slab is None or slab[0].shape[1] < target.blocks * BLOCK_TOKENS:
            slab = self._slabs[layer] = self._grown(slab, target.blocks, keys, values)
        for tensor, rows in zip(slab, (keys, values), strict=True):
            if isinstance(target.slots, slice):
                tensor[:, target.slots] = rows
            else:
                tensor.index_copy_(1, target.slots, rows)
            if target.cleared is not None:
                tensor.index_fill_(1, target.cleared, 0)
        return slab

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
                keys, values = self._slabs[layer]
                if keys.shape[1] < blocks * BLOCK_TOKENS:
                    keys, values = self._slabs[layer] = self._grown((keys, values), blocks, keys, values)
                for tensor in (keys, values):
                    tensor[:, _slots(target)] = tensor[:, _slots(source)]

    def retain(self, heights: Mapping[int, int]) -> None:
        """Free the memory of all layers but these, and theirs past the given number of blocks."""
        self._scratch.clear()
        for layer in list(self._slabs):
            slots = heights.get(layer, 0) * BLOCK_TOKENS
            if slots == 0:
                del self._slabs[layer]
            elif slots < self._slabs[layer][0].shape[1]:
                keys, values = self._slabs[layer]
                self._slabs[layer] = keys[:, :slots].clone(), values[:, :slots].clone()

    def _grown(
        self, old: tuple[Tensor, Tensor] | None, blocks: int, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        had = 0 if old is None else old[0].shape[1]
        slots = max(blocks * BLOCK_TOKENS, had + had // 2 // BLOCK_TOKENS * BLOCK_TOKENS)
        new = (
            keys.new_empty(keys.shape[0], slots, keys.shape[2]),
            values.new_empty(values.shape[0], slots, values.shape[2]),
        )
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
    ends = np.cumsum([-(-count // BLOCK_TOKENS) for count in tokens])
    return [SessionCache(store, {None: numbers}) for numbers in np.split(np.arange(ends[-1]), ends[:-1])]


def _slots(block: int) -> slice:
    return slice(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)
