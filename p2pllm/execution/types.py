"""The values that cross the border of the execution room, free of torch so that any room may use them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from p2pllm.execution.tally import Totals

__all__ = ["DTYPES", "Activation", "ExecutorStats", "SamplingParams", "SessionKey", "StageOutput", "runs_of"]

SessionKey = tuple[str, int]
"""Session id and stage index: a chain may come back to a peer, and each visit has a KV cache of its own."""

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element of the dtypes that weights and activations may have."""

_EXPONENTS: Final = {
    "float32": ("<u4", 0x7F80_0000),
    "bfloat16": ("<u2", 0x7F80),
    "float16": ("<u2", 0x7C00),
}
"""How to read an element as bits, and those of its exponent: all set in what is no finite number."""


@dataclass(frozen=True, slots=True)
class Activation:
    """Hidden states on their way between stages.

    ``shape`` is (tokens, hidden); ``data`` holds the elements in row order, in the sender's ``dtype``
    (a key of `DTYPES`), little-endian.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def is_finite(self) -> bool:
        """Whether all its elements are numbers, and not infinite."""
        kind, exponent = _EXPONENTS[self.dtype]
        return int((np.frombuffer(self.data, kind) & exponent).max(initial=0)) < exponent

    def rows(self, begin: int, end: int) -> Activation:
        """Rows [begin, end) of it."""
        count, *width = self.shape
        if (begin, end) == (0, count):
            return self
        size = len(self.data) // count
        return Activation(self.dtype, (end - begin, *width), self.data[begin * size : end * size])


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. Temperature 0 is greedy; ``top_k`` 0 and ``top_p`` 1 are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class StageOutput:
    """What one run leaves: hidden states, or a sampled token, or (prefill on the last stage) neither."""

    activation: Activation | None
    token: int | None


@dataclass(frozen=True, slots=True)
class ExecutorStats:
    """What a peer publishes about its executor. Times in seconds, memory in bytes.

    ``layer_s`` is the time of one decode step per layer and ``head_s`` that of norm, LM head and sampling;
    ``wait_s`` is what a run is expected to wait before its step starts. A KV block holds 16 tokens of all
    layers of the slice; those cached are kept of past sessions while nobody wants their room, so they count
    as free. ``totals`` are sums since the start.
    """

    layer_s: float
    head_s: float
    wait_s: float
    running: int
    waiting: int
    kv_blocks_total: int
    kv_blocks_free: int
    kv_blocks_cached: int
    kv_bytes_used: int
    weight_bytes: int
    totals: Totals = field(default_factory=Totals)


def runs_of(layers: Collection[int]) -> tuple[tuple[int, int], ...]:
    """The runs [start, end) that layers fall into, apart from each other, in order."""
    starts = sorted(layer for layer in layers if layer - 1 not in layers)
    ends = sorted(layer + 1 for layer in layers if layer + 1 not in layers)
    return tuple(zip(starts, ends, strict=True))
