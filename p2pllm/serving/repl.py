"""The chat in a terminal: a read-eval-print loop over a peer's API."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.patch_stdout import patch_stdout
from rich.console import Console

from p2pllm.errors import P2PLLMError
from p2pllm.serving.client import ApiClient, Figures
from p2pllm.serving.tables import swarm_table

__all__ = ["chat_loop", "print_answer"]

HELP = """/swarm  show who serves which layers     /reset  forget the conversation
/help   this list                       /exit   leave (Ctrl-D does the same); Ctrl-C stops an answer"""


async def chat_loop(
    client: ApiClient, console: Console, *, on_interrupt: Callable[[], None] | None = None
) -> None:
    """Chat until the user leaves.

    Args:
        on_interrupt: what Ctrl-C means outside an answer, when this process already handles that signal.
    """
    session: PromptSession[str] = PromptSession()
    messages: list[dict[str, Any]] = []
    console.print("Type a message; /help lists the commands.", style="dim")
    while True:
        try:
            with patch_stdout(raw=True):
                line = (await session.prompt_async("› ", handle_sigint=False)).strip()
        except (EOFError, KeyboardInterrupt):
            return
        match line:
            case "":
                continue
            case "/exit" | "/quit":
                return
            case "/help":
                console.print(HELP, style="dim", highlight=False)
            case "/reset":
                messages.clear()
            case "/swarm":
                await _show_swarm(client, console)
            case _ if line.startswith("/"):
                console.print(f"there is no {line.split()[0]}; /help lists the commands", style="yellow")
            case _:
                messages.append({"role": "user", "content": line})
                text = await _interruptible(print_answer(client, console, messages), on_interrupt)
                if text is None:
                    messages.pop()
                else:
                    messages.append({"role": "assistant", "content": text})


async def print_answer(
    client: ApiClient, console: Console, messages: list[dict[str, Any]], **options: Any
) -> str | None:
    """Print one answer as it streams, then a line of figures; returns its text, None when it failed."""
    text = ""
    try:
        async with aclosing(client.chat(messages, **options)) as answer:
            async for piece in answer:
                if isinstance(piece, Figures):
                    console.print(f"\n{piece.line()}", style="dim", highlight=False, soft_wrap=True)
                else:
                    text += piece
                    console.out(piece, end="", highlight=False)
    except P2PLLMError as error:
        console.print(f"\n{error}", style="red", highlight=False, soft_wrap=True)
        return text or None
    return text


async def _interruptible(answer: Any, on_interrupt: Callable[[], None] | None) -> str | None:
    """Run one answer; Ctrl-C cancels it alone."""
    loop = asyncio.get_running_loop()
    task: asyncio.Task[str | None] = asyncio.ensure_future(answer)
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await asyncio.wait({task})
    finally:
        if on_interrupt is not None:
            loop.add_signal_handler(signal.SIGINT, on_interrupt)
        else:
            loop.remove_signal_handler(signal.SIGINT)
        task.cancel()
    if task.cancelled():
        print()  # noqa: T201  end the line that was cut
        return None
    return task.result()


async def _show_swarm(client: ApiClient, console: Console) -> None:
    try:
        console.print(swarm_table(await client.swarm()))
    except P2PLLMError as error:
        console.print(str(error), style="red", highlight=False)
