"""Attention of a whole ragged batch in one call, where there is a kernel for it: FlashAttention-2 (Dao, 2023)
on CUDA, as torch brings it along.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

__all__ = ["Packed", "has_kernel", "pack", "varlen"]

_HALVES = torch.float16, torch.bfloat16
_MOST_DIM = 256
_LEAST_CAPABILITY = 8, 0


@dataclass(frozen=True, slots=True)
class Packed:
    """The keys of all segments of a step one after the other, and where each segment's rows and keys end.

    ``slots`` (keys,) are those of the slabs. The last query of a segment sees the last of its keys.
    """

    slots: Tensor
    row_ends: Tensor
    """(segments + 1,) int32, from 0"""
    key_ends: Tensor
    """(segments + 1,) int32, from 0"""
    most_rows: int
    most_keys: int


def has_kernel(query: Tensor, value: Tensor) -> bool:
    """Whether heads like these can be given to `varlen`, where neither soft cap nor sinks are asked for."""
    return (
        query.is_cuda
        and query.dtype in _HALVES
        and query.shape[-1] == value.shape[-1] <= _MOST_DIM
        and torch.cuda.get_device_capability(query.device) >= _LEAST_CAPABILITY
        and _kernel() is not None
    )


def pack(rows: Sequence[int], keys: Sequence[int], slots: Tensor) -> Packed:
    """Segments of so many rows and keys each, whose keys are ``slots``."""

    def ends(counts: Sequence[int]) -> Tensor:
        return torch.tensor([0, *accumulate(counts)], dtype=torch.int32).to(slots.device)

    return Packed(slots, ends(rows), ends(keys), max(rows), max(keys))


def varlen(
    query: Tensor, keys: Tensor, values: Tensor, packed: Packed, *, scale: float, window: int | None
) -> Tensor:
    """(tokens, heads, dim) from ``query`` (heads, tokens, dim) and the slabs (KV heads, slots, dim)."""
    kernel = _kernel()
    if kernel is None:
        raise RuntimeError("this torch has no attention over ragged batches: ask has_kernel first")
    mixed: Tensor = kernel(
        query.transpose(0, 1),
        keys.index_select(1, packed.slots).transpose(0, 1),
        values.index_select(1, packed.slots).transpose(0, 1),
        packed.row_ends,
        packed.key_ends,
        packed.most_rows,
        packed.most_keys,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=True,
    )
    return mixed


@cache
def _kernel() -> Callable[..., Any] | None:
    """torch's own, since it serves grouped queries (2.12)."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "enable_gqa" in signature(varlen_attn).parameters else None
