"""How many layers fit into a peer's memory, from bytes alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from p2pllm.errors import ModelError
from p2pllm.scheduling.types import Capacity

__all__ = ["WORKSPACE_BYTES", "Budget", "Fit", "ModelSize", "fit_slice", "kv_room"]

KV_RESERVE_TOKENS = 2048
"""A slice without room for this many tokens of KV cache could hold weights, but serve nobody."""

KV_SHARE = 4
"""KV caches get one part in this many of the memory, more only where a slice could not serve otherwise."""

WORKSPACE_BYTES = 64 * 2**20
"""Activations of one step."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A model in bytes, in the dtype in which a peer holds it.

    ``head_bytes`` is norm and LM head as a last stage holds them. Where the head is ``tied`` to the embedding
    it is a copy of that, which a peer with the whole model does not need.
    """

    layers: int
    layer_bytes: int
    embed_bytes: int
    head_bytes: int
    kv_bytes_per_token_layer: int
    tied: bool = False

    def ends(self, *, is_first: bool, is_last: bool) -> int:
        """Bytes that a slice holds beside its layers."""
        if is_first and is_last and self.tied:
            return max(self.embed_bytes, self.head_bytes)
        return is_first * self.embed_bytes + is_last * self.head_bytes

    def weights(self, start: int, end: int) -> int:
        """Bytes of the slice ``[start, end)`` with embedding and head where they belong."""
        ends = self.ends(is_first=start == 0, is_last=end == self.layers)
        return (end - start) * self.layer_bytes + ends


@dataclass(frozen=True, slots=True)
class Budget:
    """How a peer shares its memory between weights and KV caches.

    Either weights get ``weights_ratio`` of it, and the rest is for KV caches and activations; or every layer
    comes with room for ``kv_reserve_tokens`` of KV cache. Raises ValueError for both, or for nonsense.
    """

    weights_ratio: float | None = None
    kv_reserve_tokens: int | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if self.weights_ratio is not None and self.kv_reserve_tokens is not None:
            raise ValueError("memory is shared out by weights_ratio or by kv_reserve_tokens, not by both")
        if self.weights_ratio is not None and not 0 < self.weights_ratio <= 1:
            raise ValueError(f"weights_ratio must be above 0 and at most 1, got {self.weights_ratio}")
        if self.kv_reserve_tokens is not None and self.kv_reserve_tokens < 0:
            raise ValueError(f"kv_reserve_tokens must be 0 or more, got {self.kv_reserve_tokens}")

    def capacity(self, size: ModelSize, memory: int) -> Capacity:
        """Layers that fit into ``memory`` bytes at each place of a pipeline (c_i)."""
        room, each = self._weights_bytes(memory), size.layer_bytes + self._reserve_bytes(size)

        def fits(*, is_first: bool = False, is_last: bool = False) -> int:
            rest = room - size.ends(is_first=is_first, is_last=is_last)
            return max(0, min(size.layers, rest // each))

        return Capacity(
            middle=fits(),
            first=fits(is_first=True),
            last=fits(is_last=True),
            both=fits(is_first=True, is_last=True),
        )

    def kv_bytes(self, size: ModelSize, memory: int) -> int:
        """Bytes that ``memory`` keeps for KV caches when it holds as many layers as fit."""
        if self.weights_ratio is None:
            return self.capacity(size, memory).middle * self._reserve_bytes(size)
        return max(0, memory - WORKSPACE_BYTES - self._weights_bytes(memory))

    def _weights_bytes(self, memory: int) -> int:
        """Bytes for layers, embedding and head, and for the KV reserve that comes with each layer, if any."""
        if self.weights_ratio is None:
            return memory - WORKSPACE_BYTES
        # Activations live in what the ratio leaves, as long as that is enough.
        return min(math.floor(self.weights_ratio * memory), memory - WORKSPACE_BYTES)

    def _reserve_bytes(self, size: ModelSize) -> int:
        """KV reserve of one layer."""
        if self.weights_ratio is not None:
            return 0
        tokens = KV_RESERVE_TOKENS if self.kv_reserve_tokens is None else self.kv_reserve_tokens
        return tokens * size.kv_bytes_per_token_layer


@dataclass(frozen=True, slots=True)
class Fit:
    """A slice that fits: its layers, and the bytes that are left for KV cache."""

    start: int
    end: int
    kv_bytes: int


def kv_room(size: ModelSize, memory: int, slices: Sequence[tuple[int, int]]) -> int:
    """Bytes for KV caches beside the weights of ``slices``, which are apart from each other."""
    layers = sum(end - start for start, end in slices)
    rest = memory - WORKSPACE_BYTES - sum(size.weights(start, end) for start, end in slices)
    needed = KV_RESERVE_TOKENS * size.kv_bytes_per_token_layer * layers
    return max(0, min(rest, max(needed, memory // KV_SHARE)))


def fit_slice(size: ModelSize, memory: int, layers: tuple[int, int] | None) -> Fit:
    """The pinned slice, or the whole model when none is given.

    Raises ModelError when it does not fit, naming what would.
    """
    start, end = layers or (0, size.layers)
    if end > size.layers:
        raise ModelError(f"--layers {start}:{end} is beyond the model, which has layers 0:{size.layers}")
    rest = memory - WORKSPACE_BYTES - size.weights(start, end)
    needed = KV_RESERVE_TOKENS * size.kv_bytes_per_token_layer * (end - start)
    if rest >= needed:
        return Fit(start, end, kv_room(size, memory, [(start, end)]))
    fits = Budget().capacity(size, memory).middle
    raise ModelError(
        f"layers {start}:{end} need {_mib(memory - rest + needed)} but this peer has {_mib(memory)}: "
        + (f"pass --layers with at most {fits}, or " if fits else "")
        + "raise --memory"
    )


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"
