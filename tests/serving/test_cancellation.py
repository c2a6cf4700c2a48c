"""A request that is not wanted any more, or breaks off: all is free on all stages within a second."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from support.entries import QUESTION, Entry, Steps, ask, until
from support.wires import A, B, C, D, StandIn, Wires, chain

from p2pllm.errors import BusyError, NoRouteError, P2PLLMError, SessionError
from p2pllm.execution import StageOutput
from p2pllm.transport import Hidden

PATH = "/v1/chat/completions"
FREED_S = 1.0
LONG = QUESTION | {"max_tokens": 150}


class Swarm:
    """Three stages, an entry with its API, and a client."""

    def __init__(self, network: Wires, entry: Entry, client: aiohttp.ClientSession) -> None:
        self.network, self.entry, self.client = network, entry, client

    async def freed(self) -> None:
        """Within a second no stage, and no place at the gate, is taken."""
        await until(lambda: self.network.idle() and not self.entry.running + self.entry.waiting, FREED_S)

    async def opened(self) -> None:
        """All stages have reserved something."""
        await until(lambda: all(executor.open for executor in self.network.executors.values()))


@asynccontextmanager
async def swarm(*, step_s: float = 0.01, **more: Any) -> AsyncIterator[Swarm]:
    network = Wires({A: (0, 2), B: (2, 4), C: (4, 6)})
    for executor in network.executors.values():
        executor.run = slowed(executor, step_s)  # type: ignore[method-assign]
    entry = Entry(network.entry(D, chain((A, 0, 2), (B, 2, 4), (C, 4, 6))), **more)
    async with network.running(), entry.listening() as client:
        yield Swarm(network, entry, client)


def slowed(executor: StandIn, step_s: float) -> Any:
    async def run(*arguments: Any, **more: Any) -> StageOutput:
        await asyncio.sleep(step_s)
        return await StandIn.run(executor, *arguments, **more)

    return run


async def answer_of(client: aiohttp.ClientSession, body: dict[str, Any]) -> bytes:
    async with client.post(PATH, json=body) as response:
        return await response.read()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_while_its_request_waits(stream: bool) -> None:
    async with swarm() as it:
        it.network.executors[B].full = True
        asking = asyncio.create_task(answer_of(it.client, LONG | {"stream": stream}))
        await until(lambda: it.entry.waiting == 1)
        asking.cancel()
        await it.freed()
        await it.entry.api.idle()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_while_its_prompt_is_read(stream: bool) -> None:
    async with swarm() as it:
        it.network.tamper = lambda _, message: None if isinstance(message, Hidden) else message
        asking = asyncio.create_task(answer_of(it.client, LONG | {"stream": stream}))
        await it.opened()
        asking.cancel()
        await it.freed()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_while_it_is_answered(stream: bool) -> None:
    async with swarm(step_s=0.0) as it:
        asking = asyncio.create_task(answer_of(it.client, LONG | {"stream": stream}))
        await it.opened()
        tokens = it.network.executors[C].open
        await until(lambda: any(len(held) > 15 for held in tokens.values()))
        asking.cancel()
        await it.freed()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_string_ends_the_answer_on_all_stages(stream: bool) -> None:
    async with swarm(step_s=0.0) as it:
        whole = await said(it.client, QUESTION | {"max_tokens": 40, "stream": False})
        stop = whole[10:13]
        text = await said(it.client, LONG | {"stop": stop, "stream": stream})
        assert text == whole[: whole.index(stop)]
        await it.freed()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_timeout_ends_the_answer_and_keeps_what_was_said(stream: bool) -> None:
    async with swarm(step_s=0.006) as it:
        body = LONG | {"timeout": 1.5, "stream": stream, "seed": 1}
        async with it.client.post(PATH, json=body) as response:
            text, error = split(response.status, await response.read())
        assert "timeout of 1.5 s" in error["message"]
        assert error["code"] == "broke_off"
        assert 0 < len(text) < 150
        await it.freed()


async def test_a_timeout_counts_the_queue_as_well() -> None:
    async with swarm() as it:
        it.network.executors[B].full = True
        status, body, _ = await ask(it.client, timeout=0.3)
        assert status == 503
        assert "timeout of 0.3 s" in body["error"]["message"]
        await it.freed()


@pytest.mark.parametrize(
    "error", [SessionError("the swarm has fallen apart"), NoRouteError(((3, 5),)), BusyError("no KV cache")]
)
@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_breaks_off_keeps_what_was_said(stream: bool, error: P2PLLMError) -> None:
    steps = Steps(lambda _: 0.01)
    steps.breaks, steps.breaks_at = error, 5
    async with Entry(steps).listening() as client:
        async with client.post(PATH, json=LONG | {"stream": stream}) as response:
            assert response.status == (200 if stream else 503)
            text, told = split(response.status, await response.read())
        assert text == "bcdef"
        assert told["message"] == str(error)
        assert told["type"] in ("server_error", "rate_limit_error")


def split(status: int, body: bytes) -> tuple[str, dict[str, Any]]:
    """What was said, and the error after it, of a stream (which ends as all do) or of a plain answer."""
    if status != 200:
        error = json.loads(body)["error"]
        return error["partial"], error
    *events, done = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line]
    assert done == b"[DONE]"
    *chunks, last = map(json.loads, events)
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks), last["error"]


async def said(client: aiohttp.ClientSession, body: dict[str, Any]) -> str:
    """The text of an answer that ends well."""
    async with client.post(PATH, json=body | {"temperature": 0}) as response:
        assert response.status == 200
        if not body["stream"]:
            text: str = (await response.json())["choices"][0]["message"]["content"]
            return text
        events = [line.removeprefix(b"data: ") for line in (await response.read()).split(b"\n\n") if line]
        chunks = [json.loads(event) for event in events[:-1]]
        return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
