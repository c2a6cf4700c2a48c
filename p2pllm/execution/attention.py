"""Attention over a flat ragged batch: the tokens of all sessions of a step in a row, each seeing its own
past.

Grouped queries need no copies of keys: a query that decodes has the heads that share a KV head as its rows,
and a chunk of a prompt has them as the head axis, with keys broadcast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import handle_torch_function, has_torch_function_unary

from p2pllm.execution.blocks import BLOCK_TOKENS
from p2pllm.execution.kv import KvStore
from p2pllm.execution.layout import Layout, Part, Segment, make_layout
from p2pllm.execution.varlen import has_kernel, varlen

__all__ = ["Ragged", "Segment", "attend"]


@dataclass(slots=True)
class Ragged:
    """A step's batch: token ids (1, tokens) at layer 0, hidden states (1, tokens, hidden) after it.

    The caches of all its segments are in one store.
    """

    segments: Sequence[Segment]
    positions: Tensor
    """(1, tokens)"""
    tokens: Tensor | None = None
    received: Tensor | None = None
    _layouts: dict[tuple[int | None, bool], Layout] = field(default_factory=dict)

    @property
    def rows(self) -> Tensor:
        """What goes in: one of the two."""
        rows = self.received if self.tokens is None else self.tokens
        if rows is None:
            raise ValueError("a batch has tokens or hidden states")
        return rows

    def layout(self, window: int | None, key: Tensor, value: Tensor, *, is_packed: bool) -> Layout:
        """Where tokens lie, for layers with this ``window`` and such keys and values."""
        layout = self._layouts.get((window, is_packed))
        if layout is None:
            layout = make_layout(self.segments, window, key, value, is_packed=is_packed)
            self._layouts[window, is_packed] = layout
        return layout


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
    if has_torch_function_unary(query):  # to whoever takes notes this is one call
        mixed: Tensor = handle_torch_function(
            attend,
            (query,),
            ragged,
            layer,
            query,
            key,
            value,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
        return mixed
    is_plain = softcap is None and sinks is None
    layout = ragged.layout(window, key, value, is_packed=is_plain and has_kernel(query, value))
    store = ragged.segments[0].cache.store
    store.windows[layer] = window
    keys, values = store.write(layer, layout.target, key, value)
    if layout.packed is not None:
        return varlen(query, keys, values, layout.packed, scale=scale, window=window)
    parts = []
    for part in layout.parts:
        own_keys, own_values = _read(store, keys, part, 0), _read(store, values, part, 1)
        rows = query[:, part.begin : part.end]
        if is_plain:
            parts.append(_fused(rows, own_keys, own_values, part, scale))
        else:
            parts.append(
                _explicit(rows, own_keys, own_values, part, scale=scale, softcap=softcap, sinks=sinks)
            )
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _read(store: KvStore, slab: Tensor, part: Part, which: int) -> Tensor:
    """A part's keys or values, (sessions, KV heads, keys, dim)."""
    if part.blocks is None:
        return slab[None, :, part.slots]
    heads, _, dim = slab.shape
    gathered = store.scratch(slab, (heads, len(part.blocks), BLOCK_TOKENS * dim), which)
    torch.index_select(slab.view(heads, -1, BLOCK_TOKENS * dim), 1, part.blocks, out=gathered)
    return gathered.view(heads, part.sessions, -1, dim).transpose(0, 1)[:, :, part.slots]


def _fused(query: Tensor, keys: Tensor, values: Tensor, part: Part, scale: float) -> Tensor:
    """(tokens, heads, dim) through torch's own kernels."""
    heads, tokens, dim = query.shape
    sessions, kv_heads = keys.shape[:2]
    if tokens == sessions:  # each decodes
        mask = part.mask
        out = scaled_dot_product_attention(
            query.reshape(kv_heads, -1, tokens, dim).permute(2, 0, 1, 3),
            keys,
            values,
            attn_mask=None if mask is None else mask.expand(-1, 1, heads // kv_heads, -1),
            scale=scale,
        )
        return out.reshape(tokens, heads, -1)
    size = heads // kv_heads
    out = scaled_dot_product_attention(
        query.reshape(kv_heads, size, tokens, dim),
        keys.transpose(0, 1).expand(-1, size, -1, -1),
        values.transpose(0, 1).expand(-1, size, -1, -1),
        attn_mask=part.mask,
        is_causal=part.is_causal,
        scale=scale,
    )
    return out.flatten(0, 1).transpose(0, 1)


def _explicit(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    part: Part,
    scale: float,
    *,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The same, step by step, with soft-capped scores and sinks."""
    heads, rows, dim = query.shape
    sessions, kv_heads, length, _ = keys.shape
    tokens = rows // sessions
    groups = query.reshape(kv_heads, -1, sessions, tokens, dim).permute(2, 0, 1, 3, 4)
    past, carried = keys.unsqueeze(2), values.unsqueeze(2)
    scores = groups @ past.transpose(-1, -2) * scale  # (sessions, KV heads, group, tokens, keys)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if part.mask is not None:
        scores = scores + (part.mask.unsqueeze(1) if sessions > 1 else part.mask)
    elif part.is_causal:
        hidden = torch.ones(tokens, length, dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        column = sinks.view(kv_heads, -1, 1, 1).to(scores.dtype)
        scores = torch.cat([scores, column.expand(*scores.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
    mixed = weights[..., :length] @ carried
    return mixed.permute(0, 3, 1, 2, 4).reshape(rows, heads, -1)
