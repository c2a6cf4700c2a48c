"""Hives as the bench sees them: processes with a pipe to each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import get_context
from types import TracebackType
from typing import Any, Final, Self

from p2pllm.bench.hive import live_in
from p2pllm.bench.samples import Setting
from p2pllm.errors import P2PLLMError

__all__ = ["Colony", "Dwelling"]

ANSWER_S: Final = 60.0
"""A process that takes so much longer than it was told to is lost."""

END_S: Final = 5.0


class Dwelling:
    """A process in which a hive lives."""

    def __init__(self, setting: Setting) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=live_in, args=(theirs, setting), daemon=True)
        self._process.start()
        theirs.close()

    def tell(self, method: str, *arguments: object) -> None:
        """Have the hive begin with something; `answer` waits for the outcome."""
        self._pipe.send((method, arguments))

    def answer(self, takes_s: float = 0.0) -> Any:
        """What came out. Raises what the hive raised, P2PLLMError if its process is gone or stuck."""
        try:
            answer = self._pipe.recv() if self._pipe.poll(takes_s + ANSWER_S) else TimeoutError()
        except EOFError as error:
            answer = error
        if isinstance(answer, EOFError | TimeoutError):
            raise P2PLLMError(
                "a process of the bench ended or hangs: see above, or try fewer --peers"
            ) from answer
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self) -> None:
        """End it in the middle of whatever it does."""
        self._process.kill()

    def leave(self) -> None:
        """Let it end by itself: its pipe is closed."""
        self._pipe.close()

    def end(self, by: float) -> None:
        """Wait until it has ended, and kill it at time ``by`` of the monotonic clock."""
        self._process.join(max(0.0, by - time.monotonic()))
        self.kill()
        self._process.join()
        self._process.close()


class Colony:
    """All processes of one swarm. None is left when the ``with`` block ends, however it ends."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._dwellings: list[Dwelling] = []

    def settle(self) -> Dwelling:
        """Start a process."""
        dwelling = Dwelling(self._setting)
        self._dwellings.append(dwelling)
        return dwelling

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for dwelling in self._dwellings:
            with suppress(OSError):
                dwelling.leave()
        by = time.monotonic() + END_S
        for dwelling in self._dwellings:
            dwelling.end(by)

    @staticmethod
    def ask(
        dwellings: Sequence[Dwelling], method: str, *arguments: object, takes_s: float = 0.0
    ) -> list[Any]:
        """Have some hives do the same at the same time; their answers in order."""
        for dwelling in dwellings:
            dwelling.tell(method, *arguments)
        return [dwelling.answer(takes_s) for dwelling in dwellings]
