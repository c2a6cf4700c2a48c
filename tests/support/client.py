"""Requests to peers, as tests make them."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

from p2pllm.serving import Figures, api_client

READY_DEADLINE_S = 60.0


async def until_ready(*urls: str) -> None:
    """Wait until every one of these peers can answer requests."""
    async with asyncio.timeout(READY_DEADLINE_S):
        for url in urls:
            async with api_client(url) as client:
                while not await client.ready():
                    await asyncio.sleep(0.05)


async def answer(url: str, prompt: str, **options: Any) -> tuple[str, Figures]:
    """One chat answer: its text and figures."""
    text, figures = "", None
    async with api_client(url) as client, aclosing(client.chat(chat(prompt), **options)) as pieces:
        async for piece in pieces:
            if isinstance(piece, Figures):
                figures = piece
            else:
                text += piece
    assert figures is not None
    return text, figures


def chat(prompt: str) -> list[dict[str, str]]:
    """A conversation of one user message."""
    return [{"role": "user", "content": prompt}]


async def swarm_of(url: str) -> dict[str, Any]:
    """The view of a peer."""
    async with api_client(url) as client:
        return await client.swarm()


async def free_blocks(url: str) -> dict[str, int]:
    """Free KV blocks of every peer, as its own metrics say."""
    return {peer["peer"]: peer["free_kv_blocks"] for peer in (await swarm_of(url))["peers"]}
