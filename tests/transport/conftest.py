"""Peers with links behind real servers on loopback, and a dialler that can be told to misbehave."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from p2pllm.identity import Identity, PeerId
from p2pllm.transport import LINK_PATH, Links, Message, Server, serve
from p2pllm.transport.handshake import NONCE_BYTES, Dialer

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

    def __init__(self, swarm: bytes, identity: Identity, options: dict[str, Any]) -> None:
        self.identity = identity
        self.id = identity.peer_id
        self.links = Links(
            identity, swarm, **{"on_message": self._on_message, "on_down": self._on_down, **options}
        )
        self.received: list[tuple[PeerId, Message]] = []
        self.downs: list[PeerId] = []
        self.accepted = 0
        self.changed = asyncio.Event()
        self.server: Server
        self.address: tuple[str, int]

    async def listen(self) -> None:
        app = web.Application()
        app.router.add_get(LINK_PATH, self._accept)
        self.server = await serve(app, "127.0.0.1", 0)
        self.address = ("127.0.0.1", self.server.port)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something that this peer is told makes the condition true."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

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
    """Start a listening peer; further arguments go to Links."""
    peers: list[Peer] = []

    async def start_peer(*, swarm: bytes = SWARM, identity: Identity | None = None, **options: Any) -> Peer:
        peer = Peer(swarm, identity or Identity.generate(), options)
        await peer.listen()
        peers.append(peer)
        return peer

    yield start_peer
    for peer in peers:
        await peer.stop()


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
        url = f"http://127.0.0.1:{peer.server.port}{LINK_PATH}"
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
        dialer = Dialer(identity, swarm, peer.id, os.urandom(NONCE_BYTES))
        socket = await self.open(peer, dialer.hello().hex(), **options)
        await socket.send_bytes(dialer.prove(await socket.receive_bytes(timeout=DEADLINE_S)))
        return socket


@pytest.fixture
async def raw() -> AsyncIterator[RawDialer]:
    async with aiohttp.ClientSession() as session:
        dialer = RawDialer(session)
        yield dialer
        await dialer.close()
