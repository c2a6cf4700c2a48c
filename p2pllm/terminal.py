"""The commands that talk to a person through a peer's API: chat and status."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from p2pllm.addresses import Listening
from p2pllm.serving import (
    ApiClient,
    api_client,
    chat_loop,
    make_console,
    print_swarm,
    ranges,
    swarm_table,
)

__all__ = ["chat_beside", "chat_with", "operate", "show_status"]

READY_POLL_S = 0.25
WATCH_S = 1.0


async def chat_beside(listening: asyncio.Future[Listening], stop: asyncio.Event, log_file: Path) -> None:
    """The chat of the peer in this very process, once its API listens; leaving the chat stops the peer."""
    console = make_console()
    try:
        with console.status("starting"):
            peer = await listening
        console.print(f"API at {peer.api_url}, log in {log_file}", style="dim")
        console.print(f"others join with: {peer.join_command}", soft_wrap=True)
        async with api_client(peer.api_url, peer.api_key) as client:
            await _until_ready(client, console, stop)
            if not stop.is_set():
                print_swarm(console, await client.swarm())
                await chat_loop(client, console, on_interrupt=stop.set)
    finally:
        stop.set()


async def _until_ready(client: ApiClient, console: Console, stop: asyncio.Event) -> None:
    """Wait until this peer can answer, saying meanwhile what is lacking."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        waiting = progress.add_task("", total=None)
        reading = progress.add_task("", total=1.0, visible=False)
        while not (stop.is_set() or await client.ready()):
            swarm = await client.swarm()
            own = next((peer for peer in swarm["peers"] if peer["peer"] == swarm["self"]), None)
            missing = ranges(swarm["missing"])
            is_loading = own is not None and any(span["state"] == "loading" for span in own["spans"])
            share = swarm["loading"] if is_loading else None
            what = f"waiting for peers that serve layers {missing}" if missing else "almost ready"
            if is_loading or own is None:
                what = "loading layers"
            if swarm["bootstrap"] and not swarm["contacts"]:
                what += f"; {swarm['bootstrap']} does not answer yet, still trying"
            progress.update(waiting, description=f"{what} (Ctrl-C leaves)", visible=share is None)
            progress.update(
                reading,
                description=f"loading layers, {share or 0:.0%} of them are here (Ctrl-C leaves)",
                completed=share or 0,
                visible=share is not None,
            )
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), READY_POLL_S)


async def chat_with(url: str, key: str) -> int:
    """``p2pllm chat``: the chat against a peer that runs elsewhere."""
    console = make_console()
    async with api_client(url, key) as client:
        print_swarm(console, await client.swarm())
        await chat_loop(client, console)
    return 0


async def show_status(url: str, key: str, *, as_json: bool, as_cluster: bool, watch: bool) -> int:
    """``p2pllm status``."""
    console = make_console()
    async with api_client(url, key) as client:
        if as_cluster:
            console.out(json.dumps(await client.cluster(), indent=2))
        elif as_json:
            console.out(json.dumps(await client.swarm()))
        elif watch:
            with Live(console=console, auto_refresh=False) as live:
                while True:
                    live.update(swarm_table(console, await client.swarm()), refresh=True)
                    await asyncio.sleep(WATCH_S)
        else:
            print_swarm(console, await client.swarm())
    return 0


async def operate(url: str, command: str, *, force: bool = False) -> int:
    """``p2pllm replan``, ``leave``, ``pause`` and ``resume``."""
    async with api_client(url) as client:
        await client.operate(command, force=force)
    make_console().out(
        f"{command}: accepted; watch it with python -m p2pllm status --watch --api {client.url}"
    )
    return 0
