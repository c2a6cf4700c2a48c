"""Operator commands: taken from this machine and on purpose, or not at all."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from p2pllm.errors import P2PLLMError
from p2pllm.serving import OPERATOR_COMMANDS, api_client
from p2pllm.serving.operator import OPERATOR_HEADER, operator_routes


class Told:
    """A peer that remembers what it was told."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def replan(self, *, force: bool) -> None:
        self.words.append("replan by force" if force else "replan")

    def leave(self) -> None:
        self.words.append("leave")

    def pause(self) -> None:
        self.words.append("pause")

    def resume(self) -> None:
        self.words.append("resume")


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
async def url(told: Told) -> AsyncIterator[str]:
    app = web.Application()
    app.add_routes(operator_routes(told))
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


async def test_commands_reach_the_peer(url: str, told: Told) -> None:
    async with api_client(url) as client:
        for command in OPERATOR_COMMANDS:
            await client.operate(command)
        await client.operate("replan", force=True)
    assert told.words == [*OPERATOR_COMMANDS, "replan by force"]


async def test_a_web_page_cannot_command_the_peer(url: str, told: Told) -> None:
    async with aiohttp.ClientSession() as browser, browser.post(f"{url}/api/leave") as response:
        assert response.status == 403
    assert told.words == []


async def test_another_machine_cannot_command_the_peer(told: Told) -> None:
    @web.middleware
    async def from_afar(request: web.Request, handler: object) -> web.StreamResponse:
        return await handler(request.clone(remote="192.0.2.7"))  # type: ignore[operator,no-any-return]

    app = web.Application(middlewares=[from_afar])
    app.add_routes(operator_routes(told))
    headers = {OPERATOR_HEADER: "1"}
    async with (
        TestServer(app) as server,
        aiohttp.ClientSession() as http,
        http.post(server.make_url("/api/leave"), headers=headers) as response,
    ):
        assert response.status == 403
    assert told.words == []


async def test_who_is_no_peer_is_named(unused_tcp_port: int) -> None:
    async with api_client(f"http://127.0.0.1:{unused_tcp_port}") as client:
        with pytest.raises(P2PLLMError, match="no peer answers"):
            await client.operate("pause")
