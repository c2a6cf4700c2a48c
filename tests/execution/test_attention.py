"""Attention over a ragged batch against the definition, computed token by token."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import torch

from p2pllm.execution import attention, layout, varlen
from p2pllm.execution.attention import Ragged, Segment, attend
from p2pllm.execution.kv import KvStore, SessionCache, Target, private_caches

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


def flash(query, key, value, row_ends, key_ends, most_rows, most_keys, *, scale, window_size, enable_gqa):
    """What torch documents of its kernel for ragged batches, one sequence at a time."""
    assert enable_gqa
    assert row_ends.dtype == key_ends.dtype == torch.int32
    assert (row_ends[0], row_ends[-1]) == (0, len(query))
    assert (key_ends[0], key_ends[-1]) == (0, len(key)) == (0, len(value))
    assert (most_rows, most_keys) == (row_ends.diff().max(), key_ends.diff().max())
    left, right = window_size
    mixed = []
    key, value = (side.repeat_interleave(HEADS // KV_HEADS, dim=1) for side in (key, value))
    for (row, row_end), (first, end) in zip(
        itertools.pairwise(row_ends), itertools.pairwise(key_ends), strict=True
    ):
        q, k, v = (side.transpose(0, 1) for side in (query[row:row_end], key[first:end], value[first:end]))
        rows, keys = torch.arange(row_end - row)[:, None], torch.arange(end - first)
        distance = keys - rows - (len(keys) - len(rows))
        seen = (distance <= right) & (distance >= -left if left >= 0 else True)
        scores = q @ k.transpose(1, 2) * scale
        mixed.append((scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(mixed)


@pytest.fixture(params=["parts", "packed"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU, and as where all segments go to one kernel."""
    if request.param == "packed":
        monkeypatch.setattr(attention, "has_kernel", lambda *_: True)
        monkeypatch.setattr(varlen, "_kernel", lambda: flash)


@pytest.mark.usefixtures("kernel")
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
    caches = private_caches([TOKENS] * 2)
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


def dense(query, key, value, window):
    """(tokens, heads, dim) of one session, from whole matrices in float64."""
    keys, values = (side.double().repeat_interleave(HEADS // KV_HEADS, dim=0) for side in (key, value))
    scores = query.double() @ keys.transpose(1, 2) * 0.3
    tokens = query.shape[1]
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    if window is not None:
        seen &= torch.ones(tokens, tokens, dtype=torch.bool).triu(1 - window)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return (weights @ values).transpose(0, 1).float()


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("gather_bytes", [0, 1 << 18, 1 << 30])
def test_many_that_decode(window: int | None, gather_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all lengths, in blocks here and there, amid memory that holds no numbers: together and alone."""
    monkeypatch.setattr(layout, "_GATHER_BYTES", gather_bytes)
    rng = random.Random(4)
    torch.manual_seed(4)
    lengths = [1, 2, 16, 17, 18, 40, 41, 90, 100, 130, 600, 650]
    store = KvStore()
    nothing = torch.full((KV_HEADS, 400 * 16, DIM), float("nan"))
    store.write(5, Target(slice(0, 400 * 16), None, 400), nothing, nothing)
    free = list(range(1, 400))
    rng.shuffle(free)
    texts, segments = [], []
    for length in lengths:
        count = -(-length // 16)
        blocks = sorted(free)[:count] if length % 2 else free[:count]
        free = [block for block in free if block not in blocks]
        cache = SessionCache(store, {None: np.array(blocks)})
        text = [torch.randn(heads, length, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        for begin, end in ((0, length // 2), (length // 2, length - 1)):
            if begin < end:
                ragged = Ragged([Segment(cache, begin, end - begin)], torch.zeros(0))
                out = attend(ragged, 5, *(part[:, begin:end] for part in text), scale=0.3, window=window)
                torch.testing.assert_close(out, dense(*text, window)[begin:end], atol=1e-5, rtol=1e-5)
        texts.append(text)
        segments.append(Segment(cache, length - 1, 1))
    rows = [torch.cat([text[part][:, -1:] for text in texts], dim=1) for part in range(3)]
    out = attend(Ragged(segments, torch.zeros(0)), 5, *rows, scale=0.3, window=window)
    for got, text in zip(out, texts, strict=True):
        torch.testing.assert_close(got, dense(*text, window)[-1], atol=1e-5, rtol=1e-5)


def test_no_kernel_here() -> None:
    """It is for CUDA, and for half precision."""
    heads = torch.zeros(HEADS, 1, DIM, dtype=torch.float16)
    assert not varlen.has_kernel(heads, heads)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel is for CUDA")
@pytest.mark.parametrize("window", [None, 40])
def test_the_kernel_itself(window: int | None) -> None:
    """On a GPU, what torch brings along does what it documents: chunks and decoding sessions in one call."""
    torch.manual_seed(5)
    spans = [(0, 1), (0, 130), (99, 100), (70, 101)]
    texts = [[torch.randn(h, end, 64).half() for h in (HEADS, KV_HEADS, KV_HEADS)] for _, end in spans]
    caches = private_caches([end for _, end in spans])

    def run(step: list[tuple[int, int, int]]) -> torch.Tensor:
        rows = [torch.cat([texts[s][p][:, a:b] for s, a, b in step], dim=1).cuda() for p in range(3)]
        assert varlen.has_kernel(rows[0], rows[2])
        segments = [Segment(caches[s], a, b - a) for s, a, b in step]
        return attend(Ragged(segments, torch.zeros(0)), 5, *rows, scale=0.3, window=window).cpu().float()

    run([(s, 0, begin) for s, (begin, _) in enumerate(spans) if begin])
    got = run([(s, begin, end) for s, (begin, end) in enumerate(spans)])
    expected = [dense(*text, window)[begin:] for text, (begin, _) in zip(texts, spans, strict=True)]
    torch.testing.assert_close(got, torch.cat(expected), atol=1e-2, rtol=1e-2)
