"""The aiohttp server in a thin wrapper, used for the link endpoint and for the API alike."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Sequence
from typing import cast

from aiohttp import web

from p2pllm.config import format_addresses
from p2pllm.errors import PortTakenError, UsageError
from p2pllm.transport.reasons import reason_of

__all__ = ["Server", "serve"]

_DRAIN_S = 1.0
"""How long handlers may go on once the server closes; then they are cancelled."""

_IDLE_S = 10.0
"""How long a connection may be open without a whole request, be it the first or a further one."""

_TLS_HANDSHAKE_S = 3.0
_TLS_SHUTDOWN_S = 1.0
_BACKLOG = 128

_TRIES = 10
"""For a port that is free on all hosts."""

_NO_IPV6 = {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}


class Server:
    """A listening application; ``port`` is the real one when 0 was asked for."""

    def __init__(
        self, runner: web.AppRunner, http: web.Server, listeners: Sequence[asyncio.Server], port: int
    ) -> None:
        self._runner = runner
        self._http = http
        self._listeners = listeners
        self.port = port

    async def close(self) -> None:
        """Stop listening, give running handlers a moment, then cancel them."""
        for listener in self._listeners:
            listener.close()
        transports = [connection.transport for connection in self._http.connections]
        await self._runner.cleanup()
        for transport in transports:
            # What is still open waits for its client to agree that the encryption ends.
            if transport is not None:
                transport.abort()


async def serve(
    app: web.Application,
    hosts: Sequence[str],
    port: int,
    *,
    flag: str = "--port",
    tls: ssl.SSLContext | None = None,
) -> Server:
    """Listen on one ``port`` of all ``hosts`` (0 = one that is free on all of them), encrypted if ``tls``.

    "::" means IPv6 alone, and is left out where the machine has none if there are other hosts. A handler is
    cancelled when its client goes away. Raises UsageError naming the address and the ``flag`` to change when
    it cannot be had, PortTakenError if that is because another program has it.
    """
    async with contextlib.AsyncExitStack() as stack:
        sockets = await _listen(hosts, port, flag)
        for listening in sockets:
            stack.callback(listening.close)
        runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,
            keepalive_timeout=_IDLE_S,
            shutdown_timeout=_DRAIN_S,
        )
        stack.push_async_callback(runner.cleanup)
        await runner.setup()
        http = cast(web.Server, runner.server)
        listeners = [await _accept(http, listening, tls) for listening in sockets]
        stack.pop_all()
        return Server(runner, http, listeners, sockets[0].getsockname()[1])


async def _accept(http: web.Server, listening: socket.socket, tls: ssl.SSLContext | None) -> asyncio.Server:
    # aiohttp's own sites leave no way to bound how long a stranger may take over encryption.
    return await asyncio.get_running_loop().create_server(
        http,
        sock=listening,
        backlog=_BACKLOG,
        ssl=tls,
        ssl_handshake_timeout=_TLS_HANDSHAKE_S if tls else None,
        ssl_shutdown_timeout=_TLS_SHUTDOWN_S if tls else None,
    )


async def _listen(hosts: Sequence[str], port: int, flag: str) -> list[socket.socket]:
    """Listen on the same port of all hosts; raises UsageError."""
    for _ in range(_TRIES - 1 if port == 0 else 0):
        with contextlib.suppress(PortTakenError):
            return await _bind(hosts, port, flag)
    return await _bind(hosts, port, flag)


async def _bind(hosts: Sequence[str], port: int, flag: str) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    with contextlib.ExitStack() as stack:
        for host in hosts:
            try:
                for family, address in await _resolve(host, port):
                    listening = socket.create_server(
                        (address[0], port, *address[2:]), family=family, backlog=_BACKLOG
                    )
                    sockets.append(stack.enter_context(listening))
                    port = listening.getsockname()[1]
            except OSError as error:
                if host == "::" and len(hosts) > 1 and error.errno in _NO_IPV6:
                    continue
                kind = PortTakenError if error.errno == errno.EADDRINUSE else UsageError
                where = format_addresses([(host, port)])
                raise kind(
                    f"cannot listen on {where} ({reason_of(error)}): choose another address with {flag}"
                ) from None
        stack.pop_all()
    return sockets


async def _resolve(host: str, port: int) -> list[tuple[int, tuple[object, ...]]]:
    """Return the (family, socket address) pairs of a host or address."""
    if not 0 <= port <= 65535:
        raise OSError(None, "no such port")
    found = await asyncio.get_running_loop().getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))
