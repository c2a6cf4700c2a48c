"""How much many answers at once get, and what a long prompt costs those who are in the middle of theirs.

Beside it, round by round, transformers' continuous batching and forward with the same dtype and threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from statistics import median
from typing import Final

from p2pllm.bench.own import Own, own
from p2pllm.bench.quality import Weights
from p2pllm.bench.rival import Rival
from p2pllm.bench.spread import Spread
from p2pllm.execution import ChatTokenizer, default_threads, open_checkpoint, wait_briefly

__all__ = ["STREAMS", "Interference", "Prefill", "StreamsRow", "Throughput", "measure_throughput"]

STREAMS: Final = (1, 4, 8, 16)
PREFILL_TOKENS: Final = 512
LONG_TOKENS: Final = 2000
WARM_UP: Final = 8
TOPICS: Final = ("the sky", "a river", "music", "bread", "the moon", "trade", "sleep", "glass")
QUESTIONS: Final = tuple(f"{start} {topic}?" for start in ("What makes", "Who invented") for topic in TOPICS)
MS: Final = 1e3
POLL_S: Final = 0.01
ALONE_S: Final = 600.0

Arrivals = Sequence[Sequence[float]]
"""For each stream when its tokens came, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsRow:
    """So many answers at once.

    ``tok_s`` is of all of them together, from the first token of any to the last of any;
    ``transformers_tok_s`` that of transformers' continuous batching. ``ttft_s`` is the time to the first
    token, the median over streams, and ``interval_ms`` what lies between two tokens of a stream.
    """

    dtype: str
    streams: int
    tok_s: float
    transformers_tok_s: float
    ttft_s: float
    interval_ms: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Tokens per second of a prompt of 512, and of transformers' own forward over it."""

    tok_s: float
    reference_tok_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """The intervals (ms) between tokens of an answer when it is alone, and while a long prompt comes in."""

    alone_ms: Spread
    beside_ms: Spread

    @property
    def ratio(self) -> float:
        """Of the 99th percentiles."""
        return round(self.beside_ms.p99 / self.alone_ms.p99, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """How much to measure."""

    model: str
    dtype: str
    tokens: int
    rounds: int
    threads: int | None


async def measure_throughput(bench: Throughput) -> AsyncIterator[StreamsRow | Prefill | Interference]:
    """Yield what was measured, one after the other. Raises ModelError."""
    wait_briefly()  # all contestants, as peers do: what else runs here would decide otherwise
    checkpoint = open_checkpoint(bench.model)
    threads = bench.threads or default_threads(1)
    tokenizer = ChatTokenizer(checkpoint)
    prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in QUESTIONS]
    rival = Rival(checkpoint, threads)
    rival.become(bench.dtype)
    async with own(checkpoint, Weights(bench.dtype), threads) as engine:
        for streams in STREAMS:  # what is made at the first use of each number is not measured
            rival.batch(prompts[:streams], WARM_UP)
            await engine.decode(prompts[:streams], WARM_UP)
        for streams in STREAMS:
            yield await _streams(bench, rival, engine, prompts[:streams])
        text = list(chain.from_iterable(prompts * -(-LONG_TOKENS // len(prompts[0]))))[:LONG_TOKENS]
        yield await _prefill(bench, rival, engine, text[:PREFILL_TOKENS])
        yield await _interference(bench, engine, prompts[0], text)


async def _streams(
    bench: Throughput, rival: Rival, engine: Own, prompts: Sequence[Sequence[int]]
) -> StreamsRow:
    ours, theirs, first, between = [], [], [], []
    for _ in range(bench.rounds):
        theirs.append(together_tok_s(rival.batch(prompts, bench.tokens)))
        arrivals = await engine.decode(prompts, bench.tokens)
        ours.append(together_tok_s(arrivals))
        first += [stream[0] for stream in arrivals]
        between += intervals(arrivals)
    return StreamsRow(
        dtype=bench.dtype,
        streams=len(prompts),
        tok_s=round(median(ours), 2),
        transformers_tok_s=round(median(theirs), 2),
        ttft_s=round(median(first), 4),
        interval_ms=Spread.of(between, scale=MS),
    )


async def _prefill(bench: Throughput, rival: Rival, engine: Own, prompt: Sequence[int]) -> Prefill:
    ours, theirs = [], []
    for _ in range(bench.rounds + 1):
        theirs.append(rival.prefill_s(prompt))
        ours.append(await engine.prefill_s(prompt))
    # The first of each also pays for what is made once.
    return Prefill(
        tok_s=round(len(prompt) / median(ours[1:]), 1),
        reference_tok_s=round(len(prompt) / median(theirs[1:]), 1),
    )


async def _interference(
    bench: Throughput, engine: Own, prompt: Sequence[int], long: Sequence[int]
) -> Interference:
    alone, beside = [], []
    for _ in range(bench.rounds):
        arrivals: list[float] = []
        chat = asyncio.create_task(engine.answer(prompt, len(long), arrivals))
        async with asyncio.timeout(ALONE_S):
            while len(arrivals) < bench.tokens:  # noqa: ASYNC110  it must not be woken by each token
                await asyncio.sleep(POLL_S)
        began = time.perf_counter()
        await engine.prefill_s(long)
        ended = time.perf_counter()
        chat.cancel()
        await asyncio.wait({chat})
        alone += [late - early for early, late in pairwise(arrivals) if late <= began]
        beside += [late - early for early, late in pairwise(arrivals) if began < late <= ended]
    return Interference(alone_ms=Spread.of(alone, scale=MS), beside_ms=Spread.of(beside, scale=MS))


def together_tok_s(arrivals: Arrivals) -> float:
    """Tokens per second of all streams, from the first token of any to the last of any."""
    began, ended = min(stream[0] for stream in arrivals), max(stream[-1] for stream in arrivals)
    return (sum(map(len, arrivals)) - 1) / (ended - began)


def intervals(arrivals: Arrivals) -> list[float]:
    """Seconds between two tokens of the same stream."""
    return [late - early for stream in arrivals for early, late in pairwise(stream)]
