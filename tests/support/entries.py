"""The real API of an entry before a stand-in of the swarm, or before anything else that generates."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
from aiohttp.test_utils import TestServer

from p2pllm.scheduling import Chain
from p2pllm.serving.entry.generation import Generated, Generation
from p2pllm.serving.front.admission import Outlook
from p2pllm.serving.front.api import Api
from p2pllm.serving.front.completion import Completer
from p2pllm.serving.front.keys import ApiKeys

QUESTION = {"messages": [{"role": "user", "content": "hello"}]}
DEADLINE_S = 20.0


class LetterTokens:
    """A token is a letter: its place after "a"."""

    eos_ids = frozenset[int]()

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return [ord(letter) % 97 for message in messages for letter in message["content"]]

    def decoder(self) -> Any:
        return SimpleNamespace(push=lambda token: chr(97 + token % 26), flush=lambda: "")


class Steps:
    """Generates for all who ask at once, step by step; ``curve`` says how long a step takes for so many.

    Time is its own: ``clock`` moves by what the curve says, while a step really takes ``real_s``.
    """

    context = 10_000

    def __init__(self, curve: Callable[[int], float], real_s: float = 0.0) -> None:
        self.now = 0.0
        self.running = self.most = self.tokens = self.calls = 0
        self.prompt_tokens = self.cached_tokens = self.reroutes = self.recomputed_layer_tokens = 0
        self.failing: dict[int, Exception] = {}
        """What to raise instead of the n-th call's first token, or of all from a token on."""
        self.breaks: Exception | None = None
        self.breaks_at = 0
        self._curve = curve
        self._real_s = real_s
        self._step: asyncio.Future[None] | None = None

    def clock(self) -> float:
        return self.now

    async def generate(self, request: Generation) -> AsyncGenerator[Generated]:
        self.calls += 1
        if (error := self.failing.pop(self.calls, None)) is not None:
            raise error
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for number in range(1, request.max_tokens + 1):
                await self._next()
                if self.breaks is not None and number > self.breaks_at:
                    raise self.breaks
                self.tokens += 1
                yield Generated(number, Chain((), 0.0), "length" if number == request.max_tokens else "")
        finally:
            self.running -= 1

    async def _next(self) -> None:
        if self._step is None:
            loop = asyncio.get_running_loop()
            self._step = loop.create_future()
            loop.call_later(self._real_s, self._done)
        await asyncio.shield(self._step)

    def _done(self) -> None:
        step, self._step = self._step, None
        self.now += self._curve(max(1, self.running))
        assert step is not None
        step.set_result(None)


class Entry:
    """An entry's API that listens on loopback. ``outlook`` is what its view says."""

    def __init__(self, generator: Any, *, keys: ApiKeys | None = None, **more: Any) -> None:
        self.outlook = Outlook()
        status = SimpleNamespace(
            model="small",
            missing=lambda: self.outlook.missing,
            swarm=lambda: {"peers": []},
            stages=lambda _: [],
            outlook=lambda _: self.outlook,
        )
        self.api = Api(status=status, operator=None, rng=random.Random(1), keys=keys, **more)  # type: ignore[arg-type]
        self.api.completer = Completer(LetterTokens(), generator)  # type: ignore[arg-type]
        self._server = TestServer(self.api.application(), handler_cancellation=True)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[aiohttp.ClientSession]:
        """Serve; yields a client whose paths are relative to it."""
        connector = aiohttp.TCPConnector(limit=0)
        async with self._server, asyncio.timeout(DEADLINE_S):
            async with aiohttp.ClientSession(self._server.make_url("/"), connector=connector) as client:
                yield client
            await self.api.idle()
            assert (self.waiting, self.running) == (0, 0)

    @property
    def waiting(self) -> int:
        return self.api._gate.admission.waiting

    @property
    def running(self) -> int:
        return self.api._gate.admission.running


async def ask(
    client: aiohttp.ClientSession, key: str = "", **more: Any
) -> tuple[int, dict[str, Any], Mapping[str, str]]:
    """One request: status, body, headers."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with client.post("/v1/chat/completions", json=QUESTION | more, headers=headers) as response:
        return response.status, await response.json(), response.headers


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait until it is so."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)
