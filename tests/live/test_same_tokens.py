"""The swarm's tokens are transformers' own, however the layers are cut."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.client import answer, until_ready
from support.processes import api_of, swarm
from support.reference import Reference

PROMPTS = (
    "Why is the sky blue?",
    "Write a haiku about rivers.",
    "List the first ten prime numbers, and say what a prime number is.",
)
SLICES = {
    1: ["0:30"],
    2: ["0:7", "7:30"],
    3: ["0:13", "13:26", "26:30"],
    5: ["0:1", "1:9", "9:10", "10:22", "22:30"],
}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "seed": 1234, "max_tokens": 32}


@pytest.fixture(scope="module")
def sampled() -> dict[int, list[int]]:
    """Sampled tokens by number of peers, to compare at the end."""
    return {}


@pytest.mark.parametrize("peers", SLICES)
async def test_greedy_tokens_equal_those_of_transformers(
    peers: int, tmp_path: Path, reference: Reference, sampled: dict[int, list[int]]
) -> None:
    with swarm(tmp_path) as made:
        processes = made.start(*SLICES[peers])
        apis = [api_of(process) for process in processes]
        await until_ready(*apis)
        # Every peer can be the entry, and all of them at once.
        answers = await asyncio.gather(
            *(
                answer(apis[number % peers], prompt, temperature=0, max_tokens=64)
                for number, prompt in enumerate(PROMPTS)
            )
        )
        for prompt, (text, figures) in zip(PROMPTS, answers, strict=True):
            reference.check_greedy(prompt, figures.token_ids, limit=64)
            assert text == reference.text(figures.token_ids)
            assert [(stage["start"], stage["end"]) for stage in figures.chain] == [
                tuple(map(int, span.split(":"))) for span in SLICES[peers]
            ]
        _, figures = await answer(apis[0], PROMPTS[1], **SAMPLED)
        sampled[peers] = figures.token_ids


def test_a_seed_gives_the_same_tokens_on_any_number_of_peers(
    sampled: dict[int, list[int]], reference: Reference
) -> None:
    if not {1, 3} <= set(sampled):
        pytest.skip("needs the swarms of 1 and of 3 peers from the test above")
    for tokens in sampled.values():
        reference.check_sampled(PROMPTS[1], tokens, **SAMPLED)
    assert sampled[1] == sampled[3]
