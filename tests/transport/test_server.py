"""The server wrapper: ports, clients that go away, and an end that comes in time."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import pytest
from aiohttp import web

from p2pllm.errors import UsageError
from p2pllm.transport import serve

DEADLINE_S = 20.0


def app_with(handler):
    app = web.Application()
    app.router.add_get("/", handler)
    return app


async def test_port_zero_takes_a_free_port_and_close_frees_it():
    async def hello(request):
        return web.Response(text="hello")

    server = await serve(app_with(hello), "127.0.0.1", 0)
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{server.port}/") as response:
            assert await response.text() == "hello"
        await server.close()
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(f"http://127.0.0.1:{server.port}/")


async def test_an_address_that_cannot_be_had_is_named_with_the_flag():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            UsageError,
            match=rf"^cannot listen on 127.0.0.1:{port} \(address already in use\): .* --api-port$",
        ):
            await serve(web.Application(), "127.0.0.1", port, flag="--api-port")
    with pytest.raises(UsageError, match=r"^cannot listen on 127\.0\.0\.1:70000"):
        await serve(web.Application(), "127.0.0.1", 70000)


async def test_a_handler_ends_when_its_client_goes_away():
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def forever(request):
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    server = await serve(app_with(forever), "127.0.0.1", 0)
    async with aiohttp.ClientSession() as session:
        request = asyncio.create_task(session.get(f"http://127.0.0.1:{server.port}/"))
        await started.wait()
        request.cancel()
        async with asyncio.timeout(DEADLINE_S):
            await cancelled.wait()
    await server.close()


async def test_close_does_not_wait_for_handlers_for_ever():
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def forever(request):
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    server = await serve(app_with(forever), "127.0.0.1", 0)
    async with aiohttp.ClientSession() as session:
        request = asyncio.create_task(session.get(f"http://127.0.0.1:{server.port}/"))
        await started.wait()
        async with asyncio.timeout(DEADLINE_S):
            await server.close()
        assert cancelled.is_set()
        with pytest.raises(aiohttp.ClientError):
            await request
