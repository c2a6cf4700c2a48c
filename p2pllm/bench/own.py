"""This program's engine under measurement: one executor in this process that holds the whole model."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from p2pllm.bench.quality import Weights
from p2pllm.errors import SessionError
from p2pllm.execution import Checkpoint, Executor, SamplingParams, StageOutput

__all__ = ["Own", "own"]

GREEDY: Final = SamplingParams(temperature=0.0)
CHUNK: Final = 256
"""Prompt tokens that an entry sends at once."""

KV_BYTES: Final = 2**30


class Own:
    """Sessions of an `Executor` with all layers, by token ids and without a network."""

    def __init__(self, executor: Executor, dtype: str) -> None:
        self._executor = executor
        self._dtype = dtype
        self._numbers = itertools.count()

    @property
    def token_bytes(self) -> int:
        """Bytes of weights that a token needs: all but the embeddings, of which it needs a row."""
        embeddings = self._executor.checkpoint.embed_bytes(self._dtype)
        return self._executor.stats().weight_bytes - embeddings

    async def decode(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[float]]:
        """Answer all prompts at once; for each when its tokens came, in seconds from the start."""
        began = time.perf_counter()
        streams: list[list[float]] = [[] for _ in prompts]
        await asyncio.gather(*map(self.answer, prompts, itertools.repeat(tokens), streams))
        return [[arrival - began for arrival in stream] for stream in streams]

    async def decode_tok_s(self, prompt: Sequence[int], tokens: int) -> float:
        """Tokens per second of one answer, the first one and the prompt left out."""
        (arrivals,) = await self.decode([prompt], tokens)
        return (tokens - 1) / (arrivals[-1] - arrivals[0])

    async def prefill_s(self, prompt: Sequence[int]) -> float:
        """Seconds until the first token after a prompt."""
        ((first,),) = await self.decode([prompt], 1)
        return first

    async def answer(self, prompt: Sequence[int], tokens: int, arrivals: list[float]) -> None:
        """Answer a prompt; note when each token came (s of the performance counter)."""
        async with self._session(len(prompt) + tokens) as key:
            token = await self._prefill(key, prompt)
            arrivals.append(time.perf_counter())
            for position in range(len(prompt), len(prompt) + tokens - 1):
                token = _token(await self._executor.run(key, position, [token], sample=True))
                arrivals.append(time.perf_counter())

    async def _prefill(self, key: tuple[str, int], prompt: Sequence[int]) -> int:
        last = (len(prompt) - 1) // CHUNK * CHUNK
        for start in range(0, last, CHUNK):
            await self._executor.run(key, start, prompt[start : start + CHUNK], sample=False)
        return _token(await self._executor.run(key, last, prompt[last:], sample=True))

    @asynccontextmanager
    async def _session(self, tokens: int) -> AsyncIterator[tuple[str, int]]:
        key = (f"bench-{next(self._numbers)}", 0)
        layers = self._executor.checkpoint.layers
        self._executor.reserve(key, start=0, end=layers, tokens=tokens, sampling=GREEDY)
        try:
            yield key
        finally:
            self._executor.release(key)


@asynccontextmanager
async def own(checkpoint: Checkpoint, weights: Weights, threads: int) -> AsyncIterator[Own]:
    """Load the whole model; free it at the end. Raises `ModelError`."""
    executor = Executor(checkpoint, dtype=weights.dtype, device="cpu", threads=threads, quant=weights.quant)
    try:
        await executor.load(0, checkpoint.layers, kv_bytes=KV_BYTES)
        yield Own(executor, weights.dtype)
    finally:
        await executor.close()


def _token(output: StageOutput) -> int:
    if output.token is None:
        raise SessionError("the last stage has sampled no token")
    return output.token
