"""Takes the ports of a peer: a given one, or the first that is free."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Sequence

import structlog
from aiohttp import web

from p2pllm.config import API_PORT, LINK_PORT, PORT_TRIES
from p2pllm.dht import DhtNode
from p2pllm.errors import PortTakenError, UsageError
from p2pllm.transport import LINK_PATH, Links, Server, serve

__all__ = ["take_api_port", "take_link_port"]

log = structlog.get_logger()


async def take_link_port(
    links: Links, dht: DhtNode, hosts: Sequence[str], port: int | None, tls: ssl.SSLContext | None
) -> Server:
    """Listen with TCP for the links and with UDP for the DHT on the same port. Raises UsageError."""
    application = web.Application()
    application.router.add_get(LINK_PATH, links.accept)

    async def take(number: int) -> Server:
        server = await serve(application, hosts, number, tls=tls)
        try:
            await dht.start(hosts, server.port)
        except UsageError:
            await server.close()
            raise
        return server

    return await _first_free(port, LINK_PORT, take)


async def take_api_port(application: web.Application, host: str, port: int | None) -> Server:
    """Listen for clients of the API. Raises UsageError."""

    async def take(number: int) -> Server:
        return await serve(application, [host], number, flag="--api-port")

    return await _first_free(port, API_PORT, take)


async def _first_free(given: int | None, default: int, take: Callable[[int], Awaitable[Server]]) -> Server:
    """Take the given port, or else the first one from ``default`` on that is free. Raises UsageError."""
    if given:
        return await take(given)
    # With 0 the system names a free TCP port, and each try another one: its UDP twin may be taken.
    *first, last = [0] * PORT_TRIES if given == 0 else range(default, default + PORT_TRIES)
    for port in first:
        try:
            return await take(port)
        except PortTakenError:
            if port:
                log.info("port_taken", port=port, next=port + 1)
    return await take(last)
