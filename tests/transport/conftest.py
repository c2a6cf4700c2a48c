"""Peers with links behind real servers on loopback, and a dialler that can be told to misbehave."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import aiohttp
import psutil
import pytest
from aiohttp import web

from p2pllm.identity import Identity, PeerId
from p2pllm.transport import LINK_PATH, Certificate, Links, Message, Server, make_certificate, serve
from p2pllm.transport.handshake import NONCE_BYTES, Dialer, Terms

SWARM = bytes(range(20))

DEADLINE_S = 20.0
"""When a wait is given up as failed; nothing takes anywhere near as long."""


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run every test on the loop that peers use and on the one they fall back to."""
    factories: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    if sys.platform != "win32":
        import uvloop

        factories["uvloop"] = uvloop.new_event_loop
    return factories


class Peer:
    """Links behind a server, with all that they report."""

    def __init__(
        self, swarm: bytes, identity: Identity, certificate: Certificate | None, options: dict[str, Any]
    ) -> None:
        self.identity = identity
        self.id = identity.peer_id
        self.certificate = certificate
        self.fingerprint = certificate.fingerprint if certificate else b""
        handlers = {"on_message": self._on_message, "on_down": self._on_down}
        self.links = Links(identity, swarm, certificate=certificate, **{**handlers, **options})
        self.received: list[tuple[PeerId, Message]] = []
        self.downs: list[PeerId] = []
        self.accepted = 0
        self.changed = asyncio.Event()
        self.server: Server
        self.address: tuple[str, int]

    async def listen(self, host: str) -> None:
        app = web.Application()
        app.router.add_get(LINK_PATH, self._accept)
        tls = self.certificate.server_context() if self.certificate else None
        self.server = await serve(app, [host], 0, tls=tls)
        self.address = (host, self.server.port)

    async def dial(self, other: Peer, timeout: float = DEADLINE_S) -> None:
        """See that there is a link to the other peer."""
        await self.links.ensure(other.id, [other.address], other.fingerprint, timeout)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something that this peer is told makes the condition true."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def connections(self) -> list[Any]:
        """What is connected to the port that it listens on."""
        port = self.server.port
        return [c for c in psutil.Process().net_connections("tcp") if c.laddr.port == port and c.raddr]

    async def until_alone(self) -> None:
        """Wait until nothing is connected; far less long than encryption gives the other side to agree."""
        async with asyncio.timeout(0.5):
            while self.connections():
                await asyncio.sleep(0.01)

    async def stop(self) -> None:
        await self.links.close()
        await self.server.close()

    async def _accept(self, request: web.Request) -> web.WebSocketResponse:
        self.accepted += 1
        return await self.links.accept(request)

    def _on_message(self, sender: PeerId, message: Message) -> None:
        self.received.append((sender, message))
        self.changed.set()

    def _on_down(self, other: PeerId) -> None:
        self.downs.append(other)
        self.changed.set()


StartPeer = Callable[..., Coroutine[Any, Any, Peer]]


@pytest.fixture
async def start() -> AsyncIterator[StartPeer]:
    """Start a listening peer, whose links are encrypted; further arguments go to Links."""
    peers: list[Peer] = []
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))

    async def start_peer(
        *,
        swarm: bytes = SWARM,
        identity: Identity | None = None,
        encrypted: bool = True,
        host: str = "127.0.0.1",
        **options: Any,
    ) -> Peer:
        certificate = make_certificate() if encrypted else None
        peer = Peer(swarm, identity or Identity.generate(), certificate, options)
        await peer.listen(host)
        peers.append(peer)
        return peer

    yield start_peer
    for peer in peers:
        await peer.stop()
    assert complaints == []


class RawDialer:
    """A WebSocket client that does the handshake by hand."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._sockets: list[aiohttp.ClientWebSocketResponse] = []

    async def open(
        self, peer: Peer, hello: str | None = None, **options: Any
    ) -> aiohttp.ClientWebSocketResponse:
        """Open the socket with this text as hello, or none."""
        headers = {} if hello is None else {"P2PLLM-Hello": hello}
        scheme = "https" if peer.certificate else "http"
        url = f"{scheme}://127.0.0.1:{peer.server.port}{LINK_PATH}"
        if peer.certificate:
            options["ssl"] = aiohttp.Fingerprint(peer.fingerprint)
        timeout = aiohttp.ClientWSTimeout(ws_close=0.1)
        socket = await self._session.ws_connect(url, headers=headers, timeout=timeout, **options)
        self._sockets.append(socket)
        return socket

    async def close(self) -> None:
        for socket in self._sockets:
            await socket.close()

    async def link(
        self, peer: Peer, identity: Identity, swarm: bytes = SWARM, **options: Any
    ) -> aiohttp.ClientWebSocketResponse:
        """Open a socket and go through the whole handshake as ``identity``."""
        dialer = Dialer(identity, Terms(swarm, peer.fingerprint), peer.id, os.urandom(NONCE_BYTES))
        socket = await self.open(peer, dialer.hello().hex(), **options)
        await socket.send_bytes(dialer.prove(await socket.receive_bytes(timeout=DEADLINE_S)))
        return socket


@pytest.fixture
async def raw() -> AsyncIterator[RawDialer]:
    async with aiohttp.ClientSession() as session:
        dialer = RawDialer(session)
        yield dialer
        await dialer.close()
