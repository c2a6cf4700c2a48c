"""Where the tokens of a step lie in the slabs, and which segments attend together.

All of it is the same for every layer that sees equally far, so it is made once per step for these. Decoding
sessions share a call where their keys are few: they are gathered, padded to one length and masked. Where
there are many, copying would cost more than calls, so they are read where they lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from p2pllm.execution.blocks import BLOCK_TOKENS, are_in_a_row, blocks_for, slots_of
from p2pllm.execution.kv import SessionCache, Tables, Target
from p2pllm.execution.varlen import Packed, pack

__all__ = ["Layout", "Part", "Segment", "make_layout", "target_of"]

_GATHER_BYTES = 1 << 18
"""Keys and values of one session up to which several are gathered for one call (measured on a CPU: at twice
as much, calls of their own are as fast)."""
_PADDING = 0.25
"""Share of a call's keys that may be padding."""


@dataclass(slots=True)
class Segment:
    """One session's tokens in a step: ``count`` of them, the first at ``position``, on top of ``cache``.

    ``tables`` are those of the cache, as they were when the step was asked for.
    """

    cache: SessionCache
    position: int
    count: int
    tables: Tables = field(default_factory=dict)

    def table(self, window: int | None) -> NDArray[np.int64]:
        """The blocks of layers that see ``window`` tokens."""
        tables = self.tables or self.cache.tables
        return tables[window] if window in tables else tables[None]


@dataclass(frozen=True, slots=True)
class Part:
    """Rows [begin, end) of a step, of ``sessions`` sessions that attend in one call.

    Their keys are ``slots`` of the slab, or where there are ``blocks``, of these gathered. ``mask`` is
    added to the scores: (tokens, keys) or, of sessions that decode, (sessions, 1, 1, keys). Without one all
    see all, or ``is_causal`` holds, which says that the keys begin with the first token.
    """

    begin: int
    end: int
    sessions: int
    blocks: Tensor | None
    slots: slice
    mask: Tensor | None
    is_causal: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the new keys and values go, and what attends to them, in the order of the rows: ``parts``, or all
    in one call.
    """

    target: Target
    parts: tuple[Part, ...]
    packed: Packed | None = None


def make_layout(
    segments: Sequence[Segment], window: int | None, key: Tensor, value: Tensor, *, is_packed: bool = False
) -> Layout:
    """The layout of a step for layers that see ``window`` tokens, and have such keys and values.

    ``is_packed`` where `p2pllm.execution.varlen` takes all segments together.
    """
    spans = [_Span(segment, window) for segment in segments]
    cleared = [span.rest for span in spans if span.enters]
    target = target_of(
        [(span.table, span.position, span.end) for span in spans],
        key,
        _indices(np.concatenate(cleared), key) if cleared else None,
    )
    if is_packed:
        keys = [span.seen for span in spans]
        packed = pack([s.count for s in spans], [len(k) for k in keys], _indices(np.concatenate(keys), key))
        return Layout(target, (), packed)
    token_bytes = key.element_size() * (key.shape[0] * key.shape[2] + value.shape[0] * value.shape[2])
    parts = []
    begin = 0
    for group in _grouped(spans, _GATHER_BYTES // token_bytes):
        end = begin + sum(span.count for span in group)
        if len(group) > 1:
            parts.append(_together(begin, end, group, key))
        else:
            parts.append(_alone(begin, end, group[0], key))
        begin = end
    return Layout(target, tuple(parts))


def target_of(
    spans: Sequence[tuple[NDArray[np.int64], int, int]], rows: Tensor, cleared: Tensor | None = None
) -> Target:
    """Where ``rows`` go: those of tokens [begin, end) of sessions with such tables, (table, begin, end)."""
    if len(spans) == 1:
        ((table, begin, end),) = spans
        # Plain Python here and in `_Span`: where a single token is decoded, each call of numpy would be felt.
        blocks = table[begin // BLOCK_TOKENS : blocks_for(end)].tolist()
        if are_in_a_row(blocks):
            first = blocks[0] * BLOCK_TOKENS + begin % BLOCK_TOKENS
            return Target(slice(first, first + end - begin), cleared, blocks[-1] + 1)
    slots = np.concatenate([slots_of(*span) for span in spans])
    return Target(_indices(slots, rows), cleared, int(slots.max()) // BLOCK_TOKENS + 1)


class _Span:
    """What one segment reads and writes."""

    def __init__(self, segment: Segment, window: int | None) -> None:
        self.position, self.count, self.window = segment.position, segment.count, window
        self.end = segment.position + segment.count
        self.first = 0 if window is None else max(0, segment.position - window + 1)
        self.table = segment.table(window)
        self.blocks: list[int] = self.table[self.first // BLOCK_TOKENS : blocks_for(self.end)].tolist()
        self.offset = self.first // BLOCK_TOKENS * BLOCK_TOKENS  # the position of the first slot of blocks
        self.is_straight = are_in_a_row(self.blocks)

    @property
    def seen(self) -> NDArray[np.int64]:
        """The slots of all keys that any of the tokens sees."""
        return slots_of(self.table, self.first, self.end)

    @property
    def enters(self) -> bool:
        """Whether the last block is not full, and new to the session."""
        return 0 < self.end % BLOCK_TOKENS <= self.count

    @property
    def rest(self) -> NDArray[np.int64]:
        """The slots of the last block after the last token."""
        first = self.blocks[-1] * BLOCK_TOKENS
        return np.arange(first + self.end % BLOCK_TOKENS, first + BLOCK_TOKENS)


def _grouped(spans: Sequence[_Span], few: int) -> Iterator[list[_Span]]:
    """Runs of spans for one call each: decoding ones with at most ``few`` keys and much the same length."""
    group: list[_Span] = []
    longest = keys = 0
    for span in spans:
        slots = len(span.blocks) * BLOCK_TOKENS
        is_open = bool(group) and group[0].count == span.count == 1 and longest <= few and slots <= few
        padded = max(longest, slots) * (len(group) + 1)
        if is_open and padded * (1 - _PADDING) <= keys + slots + BLOCK_TOKENS * len(group):
            group.append(span)
            longest, keys = max(longest, slots), keys + slots
        else:
            if group:
                yield group
            group, longest, keys = [span], slots, slots
    yield group


def _together(begin: int, end: int, group: Sequence[_Span], key: Tensor) -> Part:
    """Sessions that decode, in one call."""
    width = max(len(span.blocks) for span in group)
    blocks = np.zeros((len(group), width), dtype=np.int64)
    for row, span in zip(blocks, group, strict=True):
        row[: len(span.blocks)] = span.blocks
        row[len(span.blocks) :] = span.blocks[-1]
    firsts = np.array([[span.first - span.offset] for span in group])
    ends = np.array([[span.end - span.offset] for span in group])
    columns = np.arange(width * BLOCK_TOKENS)
    mask = _additive((columns >= firsts) & (columns < ends), key)[:, None, None]
    gathered = _indices(blocks.reshape(-1), key)
    return Part(begin, end, len(group), gathered, slice(None), mask, is_causal=False)


def _alone(begin: int, end: int, span: _Span, key: Tensor) -> Part:
    """One session, that decodes or has a chunk of its prompt."""
    trim = slice(span.first - span.offset, span.end - span.offset)
    origin = span.blocks[0] * BLOCK_TOKENS
    if span.is_straight:
        blocks, slots = None, slice(origin + trim.start, origin + trim.stop)
    else:
        blocks, slots = _indices(np.array(span.blocks), key), trim
    is_causal = span.position == 0 and span.count > 1 and (span.window is None or span.end <= span.window)
    mask = None
    if span.count > 1 and not is_causal:
        rows = np.arange(span.position, span.end)[:, None]
        columns = np.arange(span.first, span.end)
        seen = columns <= rows
        mask = _additive(seen if span.window is None else seen & (columns > rows - span.window), key)
    return Part(begin, end, 1, blocks, slots, mask, is_causal)


def _indices(numbers: NDArray[np.int64], like: Tensor) -> Tensor:
    return torch.from_numpy(numbers).to(like.device)


def _additive(seen: NDArray[np.bool_], like: Tensor) -> Tensor:
    """What is added to scores so that only what is ``seen`` counts."""
    return torch.from_numpy(np.where(seen, np.float32(0), np.float32(-np.inf))).to(like.device, like.dtype)
