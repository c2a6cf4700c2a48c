"""Ten minutes of clients that come, go, talk on, and change their minds: nothing may stay behind."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import aclosing

import psutil
import pytest
from support.client import chat, free_blocks, swarm_of, until_ready
from support.processes import Process, api_of, swarm

from p2pllm.serving import api_client

SECONDS = 600
WARM_UP_S = 60
CLIENTS = 4
LONGEST = 8
"""Messages of a conversation; what was said before is in the prefix caches of the stages."""

CHANGES_SUBJECT = 0.4
ALLOCATOR_SLACK = 400 * 2**20
PROMPTS = ("Hello!", "Count to a hundred.", "Tell a long story about " + "a river and " * 200 + "the sea.")


async def client(urls: list[str], rng: random.Random, until: float) -> int:
    """Ask, listen for a while or to the end, ask again, about that or something new; returns how many
    answers were begun.
    """
    begun = 0
    url, said = rng.choice(urls), list[dict[str, str]]()
    while time.monotonic() < until:
        if not said or len(said) > LONGEST or rng.random() < CHANGES_SUBJECT:
            url, said = rng.choice(urls), []
        said += chat(rng.choice(PROMPTS))
        patience = rng.choice([0, 1, 5, 1000])
        options = {"temperature": rng.choice([0.0, 1.0]), "max_tokens": rng.choice([1, 8, 60])}
        answer = ""
        async with api_client(url) as api, aclosing(api.chat(said, **options)) as pieces:
            begun += 1
            async for piece in pieces:
                answer += piece if isinstance(piece, str) else ""
                patience -= 1
                if patience < 0:
                    break
        said.append({"role": "assistant", "content": answer})
    return begun


@pytest.fixture(scope="module")
def three_small_peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Process]]:
    """Three peers with so little memory for KV that what they keep of old texts soon fills it."""
    with swarm(tmp_path_factory.mktemp("small")) as made:
        peers = made.start("0:13", "13:19", "19:30", more=["--memory", "700MiB"])
        asyncio.run(until_ready(*map(api_of, peers)))
        yield peers


@pytest.mark.slow
async def test_nothing_stays_behind(three_small_peers: list[Process]) -> None:
    urls = [api_of(peer) for peer in three_small_peers]
    idle_blocks = await free_blocks(urls[0])

    async def run(seconds: float, seed: int) -> list[int]:
        until = time.monotonic() + seconds
        clients = (client(urls, random.Random(seed + number), until) for number in range(CLIENTS))
        return await asyncio.gather(*clients)

    def memory() -> list[int]:
        return [psutil.Process(peer.popen.pid).memory_info().rss for peer in three_small_peers]

    await run(WARM_UP_S, seed=0)  # allocators and caches find their size
    before = memory()
    assert min(await run(SECONDS, seed=100)) > 10
    async with asyncio.timeout(30):
        while await free_blocks(urls[0]) != idle_blocks:
            await asyncio.sleep(0.1)
    # A cache that stayed behind would be megabytes a session, hundreds of them in this time. What the C
    # allocator keeps for later does not grow without bound, but jumps by as much as this.
    for old, new in zip(before, memory(), strict=True):
        assert new < old + ALLOCATOR_SLACK
    assert all(peer["waiting"] == 0 for peer in (await swarm_of(urls[0]))["peers"])
    for peer in three_small_peers:
        assert not peer.events("session_crashed")
        assert not peer.events("message_handler_failed")
