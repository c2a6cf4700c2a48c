"""A thread that works for an event loop.

It does what an executor of one thread does for asyncio, with a future less and no locks on the way: where a
stage takes milliseconds, a step is begun and answered in half the time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar, TypeVarTuple

__all__ = ["Worker"]

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


class Worker:
    """One thread, there from its first work to `close`. All methods are for the event loop's thread."""

    def __init__(self, name: str) -> None:
        self._thread = Thread(target=self._work, name=name, daemon=True)
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._is_closed = False

    def run(self, function: Callable[[*_Ts], _T], *args: *_Ts) -> asyncio.Future[_T]:
        """Call ``function`` once all before it is done, also if the future is cancelled meanwhile.

        Raises RuntimeError after `close`.
        """
        if self._is_closed:
            raise RuntimeError(f"{self._thread.name} is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()

        def job() -> None:
            try:
                answer = partial(_succeed, future, function(*args))
            except BaseException as error:
                answer = partial(_fail, future, error)
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(answer)

        self._jobs.put(job)
        if self._thread.ident is None:
            self._thread.start()
        return future

    async def close(self) -> None:
        """Let what was asked for be done, and leave no thread. Once more does no harm."""
        if self._thread.ident is not None:
            if not self._is_closed:
                await self.run(lambda: None)
                self._jobs.put(None)
            self._thread.join()
        self._is_closed = True

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _succeed(future: asyncio.Future[_T], result: _T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[_T], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
