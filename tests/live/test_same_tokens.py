"""The swarm's tokens are transformers' own, however the layers are cut."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
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

Apis = Callable[[int], list[str]]


@pytest.fixture(scope="module")
def apis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apis]:
    """The API of every peer of a swarm of so many peers, each swarm started once."""
    started: dict[int, list[str]] = {}
    with ExitStack() as stack:

        def of(peers: int) -> list[str]:
            if peers not in started:
                made = stack.enter_context(swarm(tmp_path_factory.mktemp(f"peers-{peers}")))
                started[peers] = [api_of(process) for process in made.start(*SLICES[peers])]
            return started[peers]

        yield of


@pytest.mark.parametrize(
    "peers", [1, pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(5, marks=pytest.mark.slow)]
)
async def test_greedy_tokens_equal_those_of_transformers(
    peers: int, apis: Apis, reference: Reference
) -> None:
    urls = apis(peers)
    await until_ready(*urls)
    # Every peer can be the entry, and all of them at once.
    answers = await asyncio.gather(
        *(
            answer(urls[number % peers], prompt, temperature=0, max_tokens=64)
            for number, prompt in enumerate(PROMPTS)
        )
    )
    for prompt, (text, figures) in zip(PROMPTS, answers, strict=True):
        reference.check_greedy(prompt, figures.token_ids, limit=64)
        assert text == reference.text(figures.token_ids)
        assert [f"{stage['start']}:{stage['end']}" for stage in figures.chain] == SLICES[peers]


async def test_a_seed_gives_the_same_tokens_on_1_and_on_3_peers(apis: Apis, reference: Reference) -> None:
    found = []
    for peers in (1, 3):
        url = apis(peers)[0]
        await until_ready(url)
        _, figures = await answer(url, PROMPTS[1], **SAMPLED)
        # Each token falls where its uniform must, or within the rounding of a boundary.
        reference.check_sampled(PROMPTS[1], figures.token_ids, **SAMPLED)
        found.append(figures.token_ids)
    reference.check_same(PROMPTS[1], *found, **SAMPLED)


async def test_what_stages_have_kept_of_a_text_changes_no_token(apis: Apis, reference: Reference) -> None:
    url = apis(3)[0]
    await until_ready(url)
    story = "Go on with this story: " + "They walked along the river, and then over a hill. " * 12
    # The first leaves blocks behind, the second begins in the middle of the text, the third at its end.
    for prompt in (story, story + "It began to snow.", story):
        _, figures = await answer(url, prompt, temperature=0, max_tokens=16)
        reference.check_greedy(prompt, figures.token_ids, limit=16)
