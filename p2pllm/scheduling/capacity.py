"""How many layers fit into a peer's memory, from bytes alone."""

from __future__ import annotations

from dataclasses import dataclass

from p2pllm.errors import ModelError

__all__ = ["Fit", "ModelSize", "capacity", "fit_slice"]

KV_RESERVE_TOKENS = 2048
"""A slice without room for this many tokens of KV cache could hold weights, but serve nobody."""

KV_SHARE = 4
"""KV caches get one part in this many of the memory, more only where a slice could not serve otherwise."""

WORKSPACE_BYTES = 64 * 2**20
"""Activations of one step."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A model in bytes, in the dtype in which a peer holds it."""

    layers: int
    layer_bytes: int
    embed_bytes: int
    head_bytes: int
    kv_bytes_per_token_layer: int

    def weights(self, start: int, end: int) -> int:
        """Bytes of the slice ``[start, end)`` with embedding and head where they belong."""
        first, last = start == 0, end == self.layers
        return (end - start) * self.layer_bytes + first * self.embed_bytes + last * self.head_bytes


@dataclass(frozen=True, slots=True)
class Fit:
    """A slice that fits: its layers, and the bytes that are left for KV cache."""

    start: int
    end: int
    kv_bytes: int


def capacity(size: ModelSize, memory: int) -> int:
    """Layers that fit into ``memory`` bytes as a middle stage, KV reserve and workspace taken off (c_i)."""
    each = size.layer_bytes + KV_RESERVE_TOKENS * size.kv_bytes_per_token_layer
    return max(0, min(size.layers, (memory - WORKSPACE_BYTES) // each))


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
        return Fit(start, end, max(needed, min(rest, memory // KV_SHARE)))
    fits = capacity(size, memory)
    raise ModelError(
        f"layers {start}:{end} need {_mib(memory - rest + needed)} but this peer has {_mib(memory)}: "
        + (f"pass --layers with at most {fits}, or " if fits else "")
        + "raise --memory"
    )


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"
