"""Attention over a ragged batch against the definition, computed token by token."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from p2pllm.execution.attention import Ragged, Segment, attend
from p2pllm.execution.kv import SessionCache

HEADS, KV_HEADS, DIM, TOKENS = 6, 2, 8, 11


def by_definition(query, key, value, *, window, softcap, sinks):
    """(tokens, heads, dim) of one session, one query at a time."""
    out = torch.zeros(TOKENS, HEADS, DIM)
    for head, token in itertools.product(range(HEADS), range(TOKENS)):
        shared = head // (HEADS // KV_HEADS)
        first = 0 if window is None else max(0, token - window + 1)
        scores = [float(query[head, token] @ key[shared, past]) * 0.3 for past in range(first, token + 1)]
        if softcap is not None:
            scores = [softcap * math.tanh(score / softcap) for score in scores]
        weights = [math.exp(score) for score in scores]
        total = sum(weights) + (0 if sinks is None else math.exp(float(sinks[head])))
        for past, weight in enumerate(weights, first):
            out[token, head] += weight / total * value[shared, past]
    return out


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_against_the_definition(window: int | None, softcap: float | None, has_sinks: bool) -> None:
    torch.manual_seed(3)
    sinks = torch.randn(HEADS) if has_sinks else None
    sessions = [
        (
            torch.randn(HEADS, TOKENS, DIM),
            torch.randn(KV_HEADS, TOKENS, DIM),
            torch.randn(KV_HEADS, TOKENS, DIM),
        )
        for _ in range(2)
    ]
    caches = [SessionCache(5, 6, 4) for _ in sessions]
    for cache in caches:
        cache.capacity = 16  # grown after the first reservation
    got: list[list[torch.Tensor]] = [[], []]
    # Steps of (session, first token, end): chunks and single tokens, side by side and alone.
    for step in ([(0, 0, 6), (1, 0, 1)], [(1, 1, 9)], [(0, 6, 7), (1, 9, 10)], [(1, 10, 11), (0, 7, 11)]):
        rows = [[sessions[s][part][:, a:b] for s, a, b in step] for part in range(3)]
        ragged = Ragged([Segment(caches[s], a, b - a) for s, a, b in step], torch.zeros(0))
        query, key, value = (torch.cat(part, dim=1) for part in rows)
        out = attend(ragged, 5, query, key, value, scale=0.3, window=window, softcap=softcap, sinks=sinks)
        for (session, *_), part in zip(step, torch.split(out, [b - a for _, a, b in step]), strict=True):
            got[session].append(part)
    for session, parts in zip(sessions, got, strict=True):
        expected = by_definition(*session, window=window, softcap=softcap, sinks=sinks)
        torch.testing.assert_close(torch.cat(parts), expected, atol=1e-5, rtol=1e-5)
