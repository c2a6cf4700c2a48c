"""Who is in the handshake: for a moment only, and when there are many, whoever takes longest makes room."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

__all__ = ["Greetings"]


class Greetings:
    """At most ``most`` handshakes at one time, of at most ``seconds`` each.

    Turning newcomers away instead would let anybody shut the door, by keeping so many of them half done.
    """

    def __init__(self, most: int, seconds: float) -> None:
        self._most = most
        self._seconds = seconds
        self._deadlines: dict[asyncio.Timeout, None] = {}  # in the order of their beginnings

    @contextlib.asynccontextmanager
    async def another(self) -> AsyncIterator[None]:
        """Around one handshake; raises TimeoutError when it takes too long, or the longest of too many."""
        deadline = asyncio.timeout(self._seconds)
        try:
            async with deadline:
                if len(self._deadlines) >= self._most:
                    slowest = next(iter(self._deadlines))
                    del self._deadlines[slowest]
                    if not slowest.expired():
                        slowest.reschedule(0.0)
                self._deadlines[deadline] = None
                yield
        finally:
            self._deadlines.pop(deadline, None)
