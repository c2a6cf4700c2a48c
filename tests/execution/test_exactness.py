"""Slices of the embedded model compute what transformers computes from the same file."""

from __future__ import annotations

import gc
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch

from p2pllm.execution import ChatTokenizer, Checkpoint
from p2pllm.execution.loader import Loader

from .conftest import Chain, Slice, load_slice

if TYPE_CHECKING:
    from support.reference import Reference

CUTS = [(0, 30), (0, 11, 30), (0, 4, 23, 30)]
QUESTIONS = ["Why is the sky blue?", "Write one line about the sea."]


@pytest.fixture(scope="module", params=CUTS, ids=lambda cuts: f"{len(cuts) - 1}-stages")
def stages(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> list[Slice]:
    cuts: tuple[int, ...] = request.param
    gc.collect()  # modules refer to each other: half a gigabyte of those before would stay
    return [load_slice(checkpoint, start, end) for start, end in pairwise(cuts)]


@pytest.fixture(scope="module")
def prompts(checkpoint: Checkpoint) -> list[list[int]]:
    tokenizer = ChatTokenizer(checkpoint)
    return [tokenizer.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]


@torch.inference_mode()
def whole_logits(reference: Reference, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = reference.model(torch.tensor([tokens])).logits[0]
    return logits


def test_bfloat16_stays_close(checkpoint: Checkpoint, prompts: list[list[int]], reference: Reference) -> None:
    halves = [load_slice(checkpoint, a, b, "bfloat16") for a, b in ((0, 15), (15, 30))]
    logits = Chain(halves, sessions=1).step({0: prompts[0]})[0]
    expected = whole_logits(reference, prompts[0])
    assert torch.nn.functional.cosine_similarity(logits, expected).min() > 0.99


def test_a_part_of_a_slice(checkpoint: Checkpoint, prompts: list[list[int]], reference: Reference) -> None:
    """Chains may use only some layers of a slice, and visit a peer twice. The slice was loaded piece by
    piece.
    """
    from p2pllm.execution.attention import Segment
    from p2pllm.execution.kv import private_caches

    gc.collect()
    loader = Loader(checkpoint, dtype="float32", device="cpu")
    loader.load(10, 30)
    loader.stage.retain(range(20, 30))
    loader.load(0, 30)
    whole = loader.stage
    (cache,) = private_caches([64])
    hidden = torch.tensor(prompts[0])
    for start, end in ((0, 3), (3, 17), (17, 18), (18, 30)):
        segment = Segment(cache, 0, len(prompts[0]))
        hidden = whole.forward([segment], hidden, start, end)
    torch.testing.assert_close(whole.logits(hidden), whole_logits(reference, prompts[0]), atol=1e-4, rtol=0)


def test_logits_of_a_ragged_batch_in_chunks(
    stages: list[Slice], prompts: list[list[int]], reference: Reference
) -> None:
    chain = Chain(stages, sessions=2)
    first, second = prompts
    parts = [
        chain.step({0: first[:20]}),
        chain.step({1: second[:1], 0: first[20:27]}),
        chain.step({0: first[27:28], 1: second[1:]}),
        chain.step({0: first[28:]}),
    ]
    for session, tokens in enumerate(prompts):
        logits = torch.cat([part[session] for part in parts if session in part])
        torch.testing.assert_close(logits, whole_logits(reference, tokens), atol=1e-4, rtol=0)


def test_greedy_tokens(stages: list[Slice], prompts: list[list[int]], reference: Reference) -> None:
    """64 greedy tokens of two sessions in one batch: each is transformers' best, or within 1e-3 of it."""
    chain = Chain(stages, sessions=2)
    logits = {session: chain.step({session: tokens})[session] for session, tokens in enumerate(prompts)}
    texts = [list(tokens) for tokens in prompts]
    for _ in range(64):
        chosen = {session: [int(rows[-1].argmax())] for session, rows in logits.items()}
        for session, tokens in chosen.items():
            texts[session] += tokens
        logits = chain.step(chosen)
    for prompt, text in zip(prompts, texts, strict=True):
        expected = whole_logits(reference, text[:-1])[len(prompt) - 1 :]
        own = expected[torch.arange(64), torch.tensor(text[len(prompt) :])]
        assert (expected.max(dim=-1).values - own).max() <= 1e-3


def test_going_back_forgets_what_came_after(stages: list[Slice], prompts: list[list[int]]) -> None:
    chain = Chain(stages, sessions=1)
    chain.step({0: prompts[0][:10]})
    expected = chain.step({0: prompts[0][10:20]})[0]
    chain.lengths[0] = 10
    chain.step({0: [77] * 5})
    chain.lengths[0] = 10
    assert torch.equal(chain.step({0: prompts[0][10:20]})[0], expected)
