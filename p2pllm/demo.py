"""``p2pllm demo``: a whole swarm of OS processes on this machine, to chat with or to answer one prompt.

Nothing here is special to the demo's peers: each is ``python -m p2pllm --bootstrap … --memory …`` as anybody
runs it. They offer so little memory that it takes all of them to hold the model, and place themselves.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

import p2pllm
from p2pllm.children import Child, Children
from p2pllm.config import INTERRUPTED
from p2pllm.errors import ModelError, P2PLLMError, UsageError
from p2pllm.execution import choose_device, default_dtype, open_checkpoint
from p2pllm.machine import model_size
from p2pllm.scheduling import WORKSPACE_BYTES, Budget, Capacity, ModelSize
from p2pllm.serving import (
    ApiClient,
    Figures,
    api_client,
    chat_loop,
    make_console,
    print_answer,
    print_swarm,
)

__all__ = ["Demo", "run_demo", "share_of_memory"]

LOOPBACK = "127.0.0.1"
REGIONS = ("eu", "us", "asia", "africa", "oceania")
START_DEADLINE_S = 120.0
READY_POLL_S = 0.1
STEP_BYTES = 2**20
BOOTSTRAP_SCRIPT = Path(p2pllm.__file__).parent.parent / "bootstrap" / "bootstrap.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """What the demo is asked to do."""

    prompt: str | None
    peers: int
    regions: int
    max_tokens: int
    temperature: float
    seed: int
    json: bool
    model: str
    dtype: str | None
    threads: int | None
    debug: bool


async def run_demo(demo: Demo) -> int:
    """Start the swarm, answer or chat, and stop every process again, whatever happens. Returns the exit code.

    Raises P2PLLMError when the swarm does not come up.
    """
    if demo.json and demo.prompt is None:
        raise UsageError("--json needs a PROMPT to answer: demo PROMPT --json")
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    with tempfile.TemporaryDirectory(prefix="p2pllm-demo-") as folder:
        async with Children(echo=demo.debug) as children:
            work = asyncio.ensure_future(_demo(demo, Path(folder), children, stop.set))
            stopped = asyncio.ensure_future(stop.wait())
            await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
            (stopped if work.done() else work).cancel()
            await asyncio.wait({work, stopped})
            # The children stop in this task, which no signal cancels.
    if work.cancelled():
        return INTERRUPTED
    work.result()
    return 0


async def _demo(demo: Demo, folder: Path, children: Children, interrupt: Callable[[], None]) -> None:
    # Progress goes to stderr, so that stdout holds the answer alone.
    console = make_console(stderr=True)
    api = await _start(demo, folder, children, console)
    async with api_client(api) as client:
        if demo.json:
            print(json.dumps(await _answer(client, demo)))  # noqa: T201  the result itself
            return
        print_swarm(console, await client.swarm())
        if demo.prompt is not None:
            await print_answer(client, make_console(), _messages(demo), **_options(demo))
        else:
            console.print(f"API at {api}", style="dim")
            await chat_loop(client, make_console(), on_interrupt=interrupt)


def _messages(demo: Demo) -> list[dict[str, object]]:
    return [{"role": "user", "content": demo.prompt}]


def _options(demo: Demo) -> dict[str, object]:
    return {"max_tokens": demo.max_tokens, "temperature": demo.temperature, "seed": demo.seed}


def share_of_memory(size: ModelSize, peers: int) -> int:
    """Bytes that each of ``peers`` equal peers must offer so that together, and no fewer, they hold the
    model. Raises ModelError if the model has too few layers to go round.
    """
    if peers > size.layers:
        raise ModelError(f"{peers} peers cannot share {size.layers} layers: pass --peers {size.layers}")
    budget, low, high = Budget(), 0, 2 * WORKSPACE_BYTES + 4 * size.weights(0, size.layers)
    while not _hold(budget.capacity(size, high), size.layers, peers):
        high *= 2
    while high - low > STEP_BYTES:
        middle = (low + high) // 2
        if _hold(budget.capacity(size, middle), size.layers, peers):
            high = middle
        else:
            low = middle
    return high


def _memory(size: ModelSize, peers: int) -> int:
    """What each peer offers: room to place layers by speed, but not so much that one peer less would do."""
    return (share_of_memory(size, peers) + share_of_memory(size, max(1, peers - 1))) // 2


def _hold(capacity: Capacity, layers: int, peers: int) -> bool:
    """Whether so many equal peers can form one pipeline."""
    if peers == 1:
        return capacity.both >= layers
    ends = min(capacity.first, capacity.last)
    return ends > 0 and capacity.first + capacity.last + (peers - 2) * capacity.middle >= layers


async def _start(demo: Demo, folder: Path, children: Children, console: Console) -> str:
    """Bring up bootstrap node and peers; returns the API URL of the first peer once the swarm can answer."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        step = progress.add_task("reading the model", total=None)
        checkpoint = await asyncio.to_thread(open_checkpoint, demo.model)
        dtype = demo.dtype or default_dtype(choose_device(None))
        memory = _memory(model_size(checkpoint, dtype), demo.peers)
        progress.update(step, description="starting the bootstrap node")
        bootstrap = await _start_bootstrap(folder, children)
        progress.update(step, description="starting the peers")
        bars = [progress.add_task(f"peer {number + 1}", total=None) for number in range(demo.peers)]
        peers = [
            await children.start(
                f"peer {number + 1}",
                _peer_command(demo, number, memory, bootstrap, folder),
                on_event=partial(_show, progress, bars[number], number + 1),
            )
            for number in range(demo.peers)
        ]
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                urls = [str((await peer.event("api_listening"))["url"]) for peer in peers]
                progress.update(step, description="the peers find each other and place their layers")
                await _wait_until_ready(urls[0], peers)
        except TimeoutError:
            raise P2PLLMError(
                f"the swarm was not ready after {START_DEADLINE_S:.0f} s; --debug shows what the peers log"
            ) from None
    return urls[0]


def _show(progress: Progress, bar: TaskID, number: int, event: dict[str, object]) -> None:
    name = event.get("event")
    if name == "loading":
        progress.update(bar, description=f"peer {number}  layers {event['layers']}", completed=0.0, total=1.0)
    elif name == "loading_progress":
        progress.update(bar, completed=float(str(event["share"])))
    elif name == "ready":
        progress.update(bar, completed=1.0, total=1.0)


async def _start_bootstrap(folder: Path, children: Children) -> str:
    if not BOOTSTRAP_SCRIPT.exists():
        raise P2PLLMError(
            "the demo needs the folder bootstrap/ of the source tree: run it from a checkout (make demo)"
        )
    command = [
        sys.executable,
        str(BOOTSTRAP_SCRIPT),
        "--host",
        LOOPBACK,
        "--port",
        "0",
        "--log-json",
        "--until-eof",
    ]
    child = await children.start("the bootstrap node", [*command, "--data-dir", str(folder / "bootstrap")])
    return (await child.line("listening on ")).removeprefix("listening on ")


def _peer_command(demo: Demo, number: int, memory: int, bootstrap: str, folder: Path) -> list[str]:
    threads = demo.threads or max(1, (os.cpu_count() or 1) // demo.peers)
    command = [sys.executable, "-m", "p2pllm", "up", "--headless", "--log-json", "--bootstrap", bootstrap]
    command += ["--until-eof"]
    command += ["--host", LOOPBACK, "--port", "0", "--api-port", "0", "--model", demo.model]
    command += ["--memory", str(memory), "--threads", str(threads)]
    command += ["--region", _region(number, demo), "--data-dir", str(folder / "peers")]
    return command + (["--dtype", demo.dtype] if demo.dtype else []) + (["--debug"] if demo.debug else [])


def _region(number: int, demo: Demo) -> str:
    index = number * demo.regions // demo.peers
    return REGIONS[index] if index < len(REGIONS) else f"region-{index + 1}"


async def _wait_until_ready(url: str, peers: Sequence[Child]) -> None:
    async with api_client(url) as client:
        while not await client.ready():
            for peer in peers:
                peer.check()
            await asyncio.sleep(READY_POLL_S)


async def _answer(client: ApiClient, demo: Demo) -> dict[str, object]:
    text, figures = "", None
    async with aclosing(client.chat(_messages(demo), **_options(demo))) as answer:
        async for piece in answer:
            if isinstance(piece, Figures):
                figures = piece
            else:
                text += piece
    if figures is None:
        raise P2PLLMError("the answer ended without its figures; --debug shows what the peers log")
    return {
        "text": text,
        "token_ids": figures.token_ids,
        "chain": figures.chain,
        "ttft_s": figures.ttft_s,
        "tokens_per_s": figures.tokens_per_s,
    }
