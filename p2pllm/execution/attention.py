"""Attention over a flat ragged batch: the tokens of all sessions of a step in a row, each seeing its own
past.

Grouped queries need no copies of keys: the query heads that share a KV head become the head axis, KV heads
become the batch axis, and keys are broadcast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from p2pllm.execution.kv import SessionCache

__all__ = ["Ragged", "Segment", "attend"]


@dataclass(slots=True)
class Segment:
    """One session's tokens in a step: ``count`` of them, the first at ``position``, on top of ``cache``."""

    cache: SessionCache
    position: int
    count: int
    _masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None, device: torch.device) -> Tensor | None:
        """True where a token (row) may see a position (column); None if all see all. Made once per step."""
        if window not in self._masks:
            self._masks[window] = self._mask(window, device)
        return self._masks[window]

    def _mask(self, window: int | None, device: torch.device) -> Tensor | None:
        end = self.position + self.count
        if self.count == 1 and (window is None or end <= window):
            return None
        rows = torch.arange(self.position, end, device=device).unsqueeze(1)
        columns = torch.arange(end, device=device)
        seen = columns <= rows
        return seen if window is None else seen & (columns > rows - window)


@dataclass(slots=True)
class Ragged:
    """A step's batch: token ids (1, tokens) at layer 0, hidden states (1, tokens, hidden) after it."""

    segments: Sequence[Segment]
    positions: Tensor
    """(1, tokens)"""
    tokens: Tensor | None = None
    received: Tensor | None = None


def attend(
    ragged: Ragged,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of every segment over its own cache, which takes the new keys and values first.

    ``query`` is (heads, tokens, dim), ``key`` and ``value`` (KV heads, tokens, dim), the segments one after
    the other; the result is (tokens, heads, dim). ``window`` limits how far back a token sees, ``softcap``
    bounds the scores, ``sinks`` (heads,) are logits that take part in the softmax and carry no value.
    """
    mixed = []
    begin = 0
    for segment in ragged.segments:
        end = begin + segment.count
        keys, values = segment.cache.extend(layer, segment.position, key[:, begin:end], value[:, begin:end])
        mask = segment.mask(window, query.device)
        groups = _grouped(query[:, begin:end], keys.shape[0])
        if softcap is None and sinks is None:
            out = _fused(groups, keys, values, mask, scale)
        else:
            out = _explicit(groups, keys, values, mask, scale=scale, softcap=softcap, sinks=sinks)
        mixed.append(out.flatten(0, 1))
        begin = end
    return (mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=1)).transpose(0, 1)


def _grouped(query: Tensor, kv_heads: int) -> Tensor:
    """(heads, tokens, dim) as (KV heads, heads that share one, tokens, dim)."""
    heads, tokens, dim = query.shape
    return query.reshape(kv_heads, heads // kv_heads, tokens, dim)


def _fused(groups: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """(KV heads, group, tokens, dim) through torch's own kernels."""
    size = groups.shape[1]
    return scaled_dot_product_attention(
        groups,
        keys.unsqueeze(1).expand(-1, size, -1, -1),
        values.unsqueeze(1).expand(-1, size, -1, -1),
        attn_mask=mask,
        scale=scale,
    )


def _explicit(
    groups: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The same, step by step, with soft-capped scores and sinks."""
    scores = groups @ keys.unsqueeze(1).transpose(-1, -2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        column = sinks.reshape(*groups.shape[:2], 1, 1).to(scores.dtype)
        scores = torch.cat([scores, column.expand(-1, -1, scores.shape[2], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
    return weights[..., : keys.shape[1]] @ values.unsqueeze(1)
