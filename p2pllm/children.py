"""Child processes that log JSON events: start them, follow what they say, and never leave one behind."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from p2pllm.errors import P2PLLMError

__all__ = ["Child", "Children", "on_stdin_closed"]

STOP_S = 5.0
"""How long a child may take to stop by itself before it is killed."""

STDIN = 0
KEPT_LINES = 50
MAX_LINE = 2**20

Event = dict[str, Any]


def on_stdin_closed(stop: Callable[[], None]) -> None:
    """Call ``stop`` when stdin closes: then the parent process is gone, however it went."""
    loop = asyncio.get_running_loop()

    def readable() -> None:
        if not os.read(STDIN, 4096):
            loop.remove_reader(STDIN)
            stop()

    loop.add_reader(STDIN, readable)


class Child:
    """One child process. Its last words become the error when it ends too soon."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        on_event: Callable[[Event], None],
        echo: bool,
    ) -> None:
        self.name = name
        self._process = process
        self._on_event = on_event
        self._echo = echo
        self._events: dict[str, Event] = {}
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._news = asyncio.Condition()
        self._open_streams = 2
        self._readers = asyncio.gather(self._read(process.stdout), self._read(process.stderr))

    async def event(self, name: str) -> Event:
        """The first log event of this name. Raises P2PLLMError if the child ends before."""
        async with self._news:
            await self._news.wait_for(lambda: self._ended or name in self._events)
        if name not in self._events:
            self._fail()
        return self._events[name]

    async def line(self, prefix: str) -> str:
        """The first plain line of output that starts with ``prefix``. Raises P2PLLMError if the child ends
        before.
        """

        def found() -> str | None:
            return next((line for line in self._lines if line.startswith(prefix)), None)

        async with self._news:
            await self._news.wait_for(lambda: self._ended or found() is not None)
        return found() or self._fail()

    def check(self) -> None:
        """Raises P2PLLMError if the child has ended."""
        if self._ended or self._process.returncode is not None:
            self._fail()

    def signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def stop(self) -> None:
        """Ask it to stop, kill it if it does not, and wait until it is gone."""
        if self._process.returncode is None:
            self._process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._readers

    async def _read(self, stream: asyncio.StreamReader | None) -> None:
        if stream is None:
            return
        async for raw in stream:
            text = raw.decode(errors="replace").rstrip()
            if self._echo:
                print(f"[{self.name}] {text}", file=sys.stderr)  # noqa: T201  asked for by --debug
            event = _parsed(text)
            async with self._news:
                if event is None:
                    self._lines.append(text)
                else:
                    self._events.setdefault(event["event"], event)
                    self._on_event(event)
                self._news.notify_all()
        async with self._news:
            self._open_streams -= 1
            self._news.notify_all()

    @property
    def _ended(self) -> bool:
        return self._open_streams == 0

    def _fail(self) -> Any:
        last = next((line for line in reversed(self._lines) if line), "it said nothing")
        raise P2PLLMError(f"{self.name} ended: {last.removeprefix('p2pllm: error: ')}")


def _parsed(text: str) -> Event | None:
    try:
        event = json.loads(text)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


class Children:
    """Starts children and stops all of them at once when the ``async with`` block ends, however it ends."""

    def __init__(self, *, echo: bool = False) -> None:
        """``echo``: repeat on stderr whatever they say."""
        self._echo = echo
        self._children: list[Child] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(child.stop() for child in self._children))

    async def start(
        self, name: str, command: Sequence[str], *, on_event: Callable[[Event], None] = lambda _event: None
    ) -> Child:
        """Start a process, in a session of its own, so that Ctrl-C reaches only us.

        Its stdin stays open as long as we live, so it can tell when we were killed (``on_stdin_closed``).
        """
        spawning = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                limit=MAX_LINE,
            )
        )
        try:
            await asyncio.shield(spawning)
        finally:
            # Cancelled in the middle of the call, the process exists all the same and must be known.
            child = Child(name, await spawning, on_event, self._echo)
            self._children.append(child)
        return child
