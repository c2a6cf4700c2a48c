"""The server wrapper: ports, clients that go away, and an end that comes in time."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl

import aiohttp
import pytest
from aiohttp import web
from support.waiting import has_ipv6

from p2pllm.errors import PortTakenError, UsageError
from p2pllm.transport import make_certificate, serve

DEADLINE_S = 20.0
FULL_REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


def app_with(handler):
    app = web.Application()
    app.router.add_get("/", handler)
    return app


async def test_port_zero_takes_a_free_port_and_close_frees_it():
    server = await serve(app_with(hello), ["127.0.0.1"], 0)
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
            match=rf"^cannot listen on 127.0.0.1:{port} \(Address already in use\): .* --api-port$",
        ):
            await serve(web.Application(), ["127.0.0.1"], port, flag="--api-port")
    with pytest.raises(UsageError, match=r"^cannot listen on 127\.0\.0\.1:70000"):
        await serve(web.Application(), ["127.0.0.1"], 70000)


async def reached(host, port):
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{f'[{host}]' if ':' in host else host}:{port}/") as response,
    ):
        return await response.text()


async def hello(request):
    return web.Response(text="hello")


@needs_ipv6
async def test_several_hosts_share_one_port():
    server = await serve(app_with(hello), ["0.0.0.0", "::"], 0)
    assert await reached("127.0.0.1", server.port) == await reached("::1", server.port) == "hello"
    await server.close()
    server = await serve(app_with(hello), ["127.0.0.1", "::1"], server.port)
    assert await reached("127.0.0.1", server.port) == await reached("::1", server.port) == "hello"
    await server.close()


@needs_ipv6
async def test_ipv6_leaves_ipv4_to_others():
    server = await serve(app_with(hello), ["::"], 0)
    with socket.create_server(("127.0.0.1", server.port)):
        assert await reached("::1", server.port) == "hello"
    await server.close()


def refuse(monkeypatch, number, times=1000):
    """Make listening on IPv6 fail so often with this error."""
    listen, failures = socket.create_server, []

    def create_server(address, **options):
        if options.get("family") == socket.AF_INET6 and len(failures) < times:
            failures.append(address)
            raise OSError(number, "on purpose")
        return listen(address, **options)

    monkeypatch.setattr(socket, "create_server", create_server)
    return failures


@pytest.mark.parametrize("number", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL])
async def test_ipv6_is_left_out_where_there_is_none_unless_it_was_asked_for_by_name(monkeypatch, number):
    refuse(monkeypatch, number)
    server = await serve(app_with(hello), ["127.0.0.1", "::"], 0)
    assert await reached("127.0.0.1", server.port) == "hello"
    await server.close()
    for hosts in (["::"], ["127.0.0.1", "::1"]):
        with pytest.raises(UsageError, match=r"cannot listen on \[::1?\]"):
            await serve(app_with(hello), hosts, 0)


@needs_ipv6
async def test_a_free_port_is_one_that_is_free_on_all_hosts(monkeypatch):
    failures = refuse(monkeypatch, errno.EADDRINUSE, times=2)
    server = await serve(app_with(hello), ["127.0.0.1", "::1"], 0)
    assert await reached("::1", server.port) == "hello"
    assert len(failures) == 2
    await server.close()
    # A given port is not exchanged for another.
    refuse(monkeypatch, errno.EADDRINUSE, times=1)
    with pytest.raises(PortTakenError, match=rf"\[::1\]:{server.port}"):
        await serve(app_with(hello), ["127.0.0.1", "::1"], server.port)
    with socket.create_server(("127.0.0.1", server.port)):
        pass  # and what was taken of it is free again


async def test_a_handler_ends_when_its_client_goes_away():
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def forever(request):
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    server = await serve(app_with(forever), ["127.0.0.1"], 0)
    async with aiohttp.ClientSession() as session:
        request = asyncio.create_task(session.get(f"http://127.0.0.1:{server.port}/"))
        await started.wait()
        request.cancel()
        async with asyncio.timeout(DEADLINE_S):
            await cancelled.wait()
    await server.close()


@pytest.mark.parametrize("said", [b"", b"GET", b"GET / HTTP/1.1\r\nHost: a\r\nX-Slow: ", FULL_REQUEST])
@pytest.mark.parametrize("encrypted", [False, True])
async def test_who_asks_for_nothing_does_not_keep_a_connection(monkeypatch, said, encrypted):
    monkeypatch.setattr("p2pllm.transport.server._IDLE_S", 0.1)
    tls = make_certificate().server_context() if encrypted else None
    server = await serve(app_with(hello), ["127.0.0.1"], 0, tls=tls)
    trust_all = ssl.create_default_context()
    trust_all.check_hostname, trust_all.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", server.port, ssl=trust_all if encrypted else None
    )
    async with asyncio.timeout(DEADLINE_S):
        with contextlib.suppress(ConnectionError):
            for _ in range(3):  # a little more now and then keeps nothing open either
                writer.write(said)
                await asyncio.sleep(0.02)
        answers = await reader.read()
    assert answers.count(b"hello") == (3 if said == FULL_REQUEST else 0)
    writer.close()
    await server.close()


async def test_close_does_not_wait_for_handlers_for_ever(monkeypatch):
    monkeypatch.setattr("p2pllm.transport.server._DRAIN_S", 0.1)
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def forever(request):
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    server = await serve(app_with(forever), ["127.0.0.1"], 0)
    async with aiohttp.ClientSession() as session:
        request = asyncio.create_task(session.get(f"http://127.0.0.1:{server.port}/"))
        await started.wait()
        async with asyncio.timeout(DEADLINE_S):
            await server.close()
        assert cancelled.is_set()
        with pytest.raises(aiohttp.ClientError):
            await request
