"""Minutes of clients that come, go, and change their minds: nothing may stay behind."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import aclosing

import psutil
import pytest
from support.client import chat, free_blocks, swarm_of
from support.processes import Process, api_of

from p2pllm.serving import api_client

SECONDS = 180
CLIENTS = 4
ALLOCATOR_SLACK = 400 * 2**20
PROMPTS = ("Hello!", "Count to a hundred.", "Tell a long story about " + "a river and " * 200 + "the sea.")


async def client(urls: list[str], rng: random.Random, until: float) -> int:
    """Ask, listen for a while or to the end, ask again; returns how many answers were begun."""
    begun = 0
    while time.monotonic() < until:
        patience = rng.choice([0, 1, 5, 1000])
        options = {"temperature": rng.choice([0.0, 1.0]), "max_tokens": rng.choice([1, 8, 60])}
        request = chat(rng.choice(PROMPTS))
        async with api_client(rng.choice(urls)) as api, aclosing(api.chat(request, **options)) as pieces:
            begun += 1
            async for _ in pieces:
                patience -= 1
                if patience < 0:
                    break
    return begun


@pytest.mark.slow
async def test_nothing_stays_behind(idle_blocks: dict[str, int], three_peers: list[Process]) -> None:
    urls = [api_of(peer) for peer in three_peers]

    async def run(seconds: float, seed: int) -> list[int]:
        until = time.monotonic() + seconds
        clients = (client(urls, random.Random(seed + number), until) for number in range(CLIENTS))
        return await asyncio.gather(*clients)

    def memory() -> list[int]:
        return [psutil.Process(peer.popen.pid).memory_info().rss for peer in three_peers]

    await run(30, seed=0)  # allocators and caches find their size
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
    for peer in three_peers:
        assert not peer.events("session_crashed")
        assert not peer.events("message_handler_failed")
