"""How fast one answer comes: transformers' ``generate``, our engine alone, and three peers on loopback.

Speeds on a shared machine drift, so every round measures all of them one after the other, and what is
compared are medians over rounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from operator import eq
from statistics import fmean, median
from typing import Final

from p2pllm.bench.loopback import STAGES, THREADS, loopback, spans
from p2pllm.bench.own import own
from p2pllm.bench.quality import Weights, quality
from p2pllm.bench.rival import Rival, copy_bandwidth, llama_cpp_tok_s
from p2pllm.execution import (
    ChatTokenizer,
    Checkpoint,
    default_threads,
    in_own_thread,
    open_checkpoint,
    wait_briefly,
)

__all__ = ["Decode", "DecodeRow", "LlamaCpp", "measure_decode"]

QUESTION: Final = "Why is the sky blue?"
WEIGHTS: Final = (
    Weights("float32"),
    Weights("bfloat16"),
    Weights("bfloat16", "int8"),
    Weights("bfloat16", "int4"),
)
TEXT: Final = (
    "Three people own a computer each, and none of the three is large enough for the model that they want to "
    "use. So they share it: the first one holds the lower layers, the second the middle, and the third the "
    "upper ones. What the first has worked out travels to the second, then to the third, and what comes out "
    "at the end is a word. Then it begins again, with one word more. It sounds slow, and yet a letter "
    "goes round all three of them faster than anybody could read it."
)
"""For comparing what rounding does to a model."""

WARM_UP: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRow:
    """One way to hold the weights. Tokens per second, without the prompt and the first token.

    ``generate_tok_s`` is transformers' with as many ``threads`` and the same dtype, or float32 if weights are
    quantized; ``one_stage_tok_s`` that of our executor with all layers; ``one_thread_tok_s`` the same with as
    many threads as each of the three peers has that make ``three_stage_tok_s``. ``hop_ms`` is what each of
    three hops adds to a token: (seconds per token of three stages − those of one stage with as many threads
    as one of them) ÷ 3. ``copy_share`` is how much of the machine's copy bandwidth reading the weights takes:
    bytes of weights per token × ``one_stage_tok_s`` ÷ bytes per second read and written by copying.
    ``agreement`` is the share of the tokens of a text after which greedy sampling says the same as
    transformers in float32, and ``perplexity`` that of the same text.
    """

    dtype: str
    quant: str
    threads: int
    generate_tok_s: float
    one_stage_tok_s: float
    one_thread_tok_s: float
    three_stage_tok_s: float
    hop_ms: float
    copy_share: float
    agreement: float
    perplexity: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """How much to measure."""

    model: str
    tokens: int
    rounds: int
    threads: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaCpp:
    """llama.cpp on the same GGUF file, in the precision that it has."""

    file: str
    threads: int
    tok_s: float


@dataclass(frozen=True, slots=True)
class _Field:
    """What all contestants have in common."""

    bench: Decode
    checkpoint: Checkpoint
    threads: int
    prompt: list[int]
    text: list[int]
    best: list[int]


async def measure_decode(bench: Decode) -> AsyncIterator[DecodeRow | LlamaCpp]:
    """Yield a row for each way to hold the weights, then llama.cpp's if it is installed.

    Raises ModelError, P2PLLMError if a peer is lost.
    """
    wait_briefly()  # all contestants, as peers do: what else runs here would decide otherwise
    checkpoint = open_checkpoint(bench.model)
    threads = bench.threads or default_threads(1)
    tokenizer = ChatTokenizer(checkpoint)
    prompt = tokenizer.encode_chat([{"role": "user", "content": QUESTION}])
    text = tokenizer.encode(TEXT)
    rival = Rival(checkpoint, threads)
    field = _Field(bench, checkpoint, threads, prompt, text, rival.best(text))
    for weights in WEIGHTS:
        rival.become(weights.dtype if weights.quant == "none" else "float32")
        yield await _row(field, rival, weights)
    speed = llama_cpp_tok_s(checkpoint, prompt, bench.tokens, threads)
    if speed is not None:
        yield LlamaCpp(file=checkpoint.name, threads=threads, tok_s=round(speed, 2))


async def _row(field: _Field, rival: Rival, weights: Weights) -> DecodeRow:
    bench, checkpoint, threads, prompt = field.bench, field.checkpoint, field.threads, field.prompt
    read = await asyncio.to_thread(in_own_thread, lambda: quality(checkpoint, weights, field.text))
    quantized = [] if weights.quant == "none" else ["--quant", weights.quant]
    head = checkpoint.head_bytes(weights.dtype) / checkpoint.layer_bytes(weights.dtype)
    layers = spans(checkpoint.layers, head)
    async with (
        own(checkpoint, weights, threads) as whole,
        own(checkpoint, weights, THREADS) as alone,
        loopback(bench.model, layers, ["--dtype", weights.dtype, *quantized]) as swarm,
    ):

        async def generate(tokens: int) -> float:
            return rival.decode_tok_s(prompt, tokens)

        contestants: list[Callable[[int], Awaitable[float]]] = [
            generate,
            lambda tokens: whole.decode_tok_s(prompt, tokens),
            lambda tokens: alone.decode_tok_s(prompt, tokens),
            lambda tokens: swarm.decode_tok_s(QUESTION, tokens),
        ]
        for contestant in contestants:
            await contestant(WARM_UP)
        rounds, copies = [], []
        for _ in range(bench.rounds):
            rounds.append([await contestant(bench.tokens) for contestant in contestants])
            copies.append(copy_bandwidth(threads))
        baseline, one, one_thread, three = (median(speeds) for speeds in zip(*rounds, strict=True))
        return DecodeRow(
            dtype=weights.dtype,
            quant=weights.quant,
            threads=threads,
            generate_tok_s=round(baseline, 2),
            one_stage_tok_s=round(one, 2),
            one_thread_tok_s=round(one_thread, 2),
            three_stage_tok_s=round(three, 2),
            hop_ms=round(1e3 * median(1 / slow - 1 / fast for *_, fast, slow in rounds) / STAGES, 3),
            copy_share=round(whole.token_bytes * one / max(copies), 3),
            agreement=round(fmean(map(eq, field.best, read.best)), 4),
            perplexity=read.perplexity,
        )
