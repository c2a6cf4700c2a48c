"""The commands that talk to a person through a peer's API: chat and status."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from p2pllm.serving import api_client, chat_loop, swarm_table

__all__ = ["chat_beside", "chat_with", "show_status"]

READY_POLL_S = 0.25


async def chat_beside(listening: asyncio.Future[str], stop: asyncio.Event, log_file: Path) -> None:
    """The chat of the peer in this very process, once its API listens; leaving the chat stops the peer."""
    console = Console()
    try:
        with console.status("starting"):
            url = await listening
        console.print(f"API at {url}, log in {log_file}", style="dim", highlight=False)
        async with api_client(url) as client:
            with console.status("loading layers and looking for peers (Ctrl-C leaves)"):
                while not (stop.is_set() or await client.ready()):
                    with suppress(TimeoutError):
                        await asyncio.wait_for(stop.wait(), READY_POLL_S)
            if not stop.is_set():
                console.print(swarm_table(await client.swarm()))
                await chat_loop(client, console, on_interrupt=stop.set)
    finally:
        stop.set()


async def chat_with(url: str) -> int:
    """``p2pllm chat``: the chat against a peer that runs elsewhere."""
    console = Console()
    async with api_client(url) as client:
        console.print(swarm_table(await client.swarm()))
        await chat_loop(client, console)
    return 0


async def show_status(url: str, *, as_json: bool) -> int:
    """``p2pllm status``."""
    async with api_client(url) as client:
        swarm = await client.swarm()
    console = Console()
    if as_json:
        console.out(json.dumps(swarm), highlight=False)
    else:
        console.print(swarm_table(swarm))
    return 0
