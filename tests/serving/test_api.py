"""The API while its peer comes and goes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from p2pllm.errors import BusyError
from p2pllm.serving.front.admission import Outlook
from p2pllm.serving.front.api import Api
from p2pllm.serving.front.completion import Finished, Text

QUESTION = {"messages": [{"role": "user", "content": "hello"}]}
DEADLINE_S = 10.0


class Status:
    """Of a swarm that serves everything."""

    model = "small"

    def missing(self) -> tuple[tuple[int, int], ...]:
        return ()

    def outlook(self, prompt: int) -> Outlook:
        return Outlook()

    def stages(self, chain: object) -> list[object]:
        return []


class Completer:
    """Answers that wait until they are let go, and then break off."""

    def __init__(self) -> None:
        self.begun, self.go = asyncio.Event(), asyncio.Event()

    async def complete(self, prompt: object, place: object) -> AsyncGenerator[Text | Finished]:
        yield Text("he")
        self.begun.set()
        await self.go.wait()
        raise BusyError("nobody is left")


async def is_idle(api: Api) -> bool:
    waiting = asyncio.ensure_future(api.idle())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    return waiting.done() and not waiting.cancelled()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("gives_up", [True, False])
async def test_it_is_idle_when_no_answer_is_on_its_way(stream: bool, gives_up: bool) -> None:
    api = Api(status=Status(), operator=None, rng=random.Random(1))  # type: ignore[arg-type]
    completer = Completer()
    server = TestServer(api.application(), handler_cancellation=True)
    async with server, aiohttp.ClientSession() as client, asyncio.timeout(DEADLINE_S):
        url = server.make_url("/v1/chat/completions")
        assert (await client.post(url, json=QUESTION)).status == 503, "it is starting"
        assert await is_idle(api)
        api.completer = completer  # type: ignore[assignment]
        asking = asyncio.create_task(client.post(url, json=QUESTION | {"stream": stream}))
        await completer.begun.wait()
        assert not await is_idle(api)
        api.unavailable = "this peer is leaving"
        assert (await client.post(url, json=QUESTION)).status == 503
        assert (await client.get(server.make_url("/healthz"))).status == 503
        assert not await is_idle(api), "the one before goes on"
        if gives_up:
            if stream:
                (await asking).close()
            asking.cancel()
        completer.go.set()
        await api.idle()
        if not gives_up:
            response = await asking
            assert response.status == (200 if stream else 503)
            await response.read()
