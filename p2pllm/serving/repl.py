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
from p2pllm.serving.tables import print_swarm

__all__ = ["chat_loop", "print_answer"]

HELP = """\
/swarm          show who serves which layers
/temperature T  how freely to choose words: 0 always takes the likeliest
/reset          forget the conversation
/help           this list
/exit           leave, as does Ctrl-D; Ctrl-C stops an answer"""

TEMPERATURE = 0.3
MAX_TEMPERATURE = 2
TOP_P = 0.9


async def chat_loop(
    client: ApiClient, console: Console, *, on_interrupt: Callable[[], None] | None = None
) -> None:
    """Chat until the user leaves.

    Args:
        on_interrupt: what Ctrl-C means outside an answer, when this process already handles that signal.
    """
    session: PromptSession[str] = PromptSession()
    chat = _Chat(client, console, on_interrupt)
    console.print("Type a message; /help lists the commands.", style="dim")
    while True:
        try:
            with patch_stdout(raw=True):
                line = (await session.prompt_async("› ", handle_sigint=False)).strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line in ("/exit", "/quit"):
            return
        if line.startswith("/"):
            await chat.command(*line.split())
        elif line:
            await chat.say(line)


class _Chat:
    """One conversation, and what its commands change."""

    def __init__(self, client: ApiClient, console: Console, on_interrupt: Callable[[], None] | None) -> None:
        self._client = client
        self._console = console
        self._on_interrupt = on_interrupt
        self._messages: list[dict[str, Any]] = []
        self._sampling = {"temperature": TEMPERATURE, "top_p": TOP_P}

    async def say(self, text: str) -> None:
        """One turn; a turn without an answer leaves no trace in the conversation."""
        messages = [*self._messages, {"role": "user", "content": text}]
        answer = print_answer(self._client, self._console, messages, **self._sampling)
        try:
            reply = await _interruptible(answer, self._on_interrupt)
        except P2PLLMError as error:
            self._console.print(str(error), style="red", soft_wrap=True)
            return
        if reply is not None:
            self._messages = [*messages, {"role": "assistant", "content": reply}]

    async def command(self, name: str, *arguments: str) -> None:
        """A line that begins with a slash."""
        match name, arguments:
            case "/help", ():
                self._console.print(HELP, style="dim")
            case "/reset", ():
                self._messages = []
                self._console.print("forgotten", style="dim")
            case "/swarm", ():
                await self._show_swarm()
            case "/temperature", _:
                self._set_temperature(" ".join(arguments))
            case _:
                line = " ".join((name, *arguments))
                self._console.print(f"there is no {line}; /help lists the commands", style="yellow")

    def _set_temperature(self, text: str) -> None:
        if text.replace(".", "", 1).isdecimal() and float(text) <= MAX_TEMPERATURE:
            self._sampling["temperature"] = float(text)
        elif text:
            self._console.print(f"a temperature is a number from 0 to {MAX_TEMPERATURE}", style="yellow")
        self._console.print(f"the temperature is {self._sampling['temperature']:g}", style="dim")

    async def _show_swarm(self) -> None:
        try:
            print_swarm(self._console, await self._client.swarm())
        except P2PLLMError as error:
            self._console.print(str(error), style="red")


async def print_answer(
    client: ApiClient, console: Console, messages: list[dict[str, Any]], **options: Any
) -> str:
    """Print one answer as it streams, then a line of figures; returns its text.

    Raises P2PLLMError when there is no answer, or it breaks off.
    """
    text = ""
    try:
        async with aclosing(client.chat(messages, **options)) as answer:
            async for piece in answer:
                if isinstance(piece, Figures):
                    console.print(f"\n{piece.line()}", style="dim", soft_wrap=True)
                else:
                    text += piece
                    console.out(piece, end="", highlight=False)
    except P2PLLMError:
        if text:
            console.print()
        raise
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
