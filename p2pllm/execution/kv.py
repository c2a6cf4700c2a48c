"""The KV cache: who has how much of the pool, and the keys and values of one session's layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from p2pllm.errors import BusyError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BLOCK_TOKENS", "KvPool", "SessionCache", "blocks_for"]

BLOCK_TOKENS = 16
"""Tokens in a block. Blocks are of one layer each: a session may use only some of a slice's layers."""


def blocks_for(tokens: int, layers: int) -> int:
    """Blocks that hold ``tokens`` tokens of ``layers`` layers."""
    return -(-tokens // BLOCK_TOKENS) * layers


class KvPool:
    """Counts blocks; the memory itself belongs to the sessions' caches.

    ``free`` is negative while sessions have more than a pool that was made smaller.
    """

    def __init__(self, blocks: int) -> None:
        self.total = blocks
        self.free = blocks

    def take(self, blocks: int) -> None:
        """Take blocks out of the pool; raises `BusyError`, taking none, if there are too few."""
        if blocks > self.free:
            raise BusyError(
                f"KV cache is full: {blocks} blocks wanted, {max(0, self.free)} of {self.total} free"
            )
        self.free -= blocks

    def give(self, blocks: int) -> None:
        """Put blocks back."""
        self.free += blocks

    def resize(self, blocks: int) -> None:
        """Have ``blocks`` in all from now on; nobody loses what is taken."""
        self.free += blocks - self.total
        self.total = blocks


@dataclass(slots=True)
class _Layer:
    """Keys and values of one layer, each (KV heads, capacity, head dim)."""

    keys: Tensor
    values: Tensor


class SessionCache:
    """Keys and values of one session's layers [start, end): contiguous, no longer than what is reserved."""

    def __init__(self, start: int, end: int, tokens: int) -> None:
        self.start = start
        self.capacity = tokens
        self.length = 0
        self._layers: list[_Layer | None] = [None] * (end - start)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in the largest layer seen so far."""
        stores = [store for store in self._layers if store is not None]
        return max(
            (t.shape[0] * t.shape[2] * t.element_size() + u.shape[0] * u.shape[2] * u.element_size())
            for t, u in ((store.keys, store.values) for store in stores)
        )

    def extend(self, layer: int, position: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values, both (KV heads, tokens, head dim), at ``position``; returns all up to their
        end.

        ``length`` is set by whoever ran all layers, so a step that fails on the way leaves the session as it
        was.
        """
        end = position + keys.shape[1]
        store = self._layers[layer - self.start]
        if store is None or store.keys.shape[1] < end:
            store = self._grow(store, keys, values, position)
            self._layers[layer - self.start] = store
        store.keys[:, position:end].copy_(keys)
        store.values[:, position:end].copy_(values)
        return store.keys[:, :end], store.values[:, :end]

    def _grow(self, old: _Layer | None, keys: Tensor, values: Tensor, kept: int) -> _Layer:
        new = _Layer(
            keys.new_empty(keys.shape[0], self.capacity, keys.shape[2]),
            values.new_empty(values.shape[0], self.capacity, values.shape[2]),
        )
        if old is not None:
            new.keys[:, :kept].copy_(old.keys[:, :kept])
            new.values[:, :kept].copy_(old.values[:, :kept])
        return new
