"""A way to a peer that a test can cut: a TCP proxy that the peer advertises in its own place."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket

__all__ = ["Proxy", "free_port"]

CHUNK = 2**16


def free_port() -> int:
    """A port on which nobody listens, by TCP or UDP."""
    while True:
        with socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp:
            tcp.bind(("127.0.0.1", 0))
            port = int(tcp.getsockname()[1])
            with contextlib.suppress(OSError):
                udp.bind(("127.0.0.1", port))
                return port


class Proxy:
    """Passes on what comes to ``port`` of its own to ``target``, on loopback."""

    def __init__(self, target: int) -> None:
        self.port = 0
        self._target = target
        self._server: asyncio.Server | None = None
        self._ways: dict[asyncio.Task[None], tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = {}

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._ways):
            task.cancel()
        await asyncio.gather(*self._ways, return_exceptions=True)

    def cut(self, rng: random.Random) -> bool:
        """Reset one of the connections, both its ends; False if there is none."""
        if not self._ways:
            return False
        for writer in self._ways[rng.choice(list(self._ways))]:
            writer.transport.abort()
        return True

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either end closes it."""
        try:
            onward, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:  # the peer is down
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._ways[task] = writer, back
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_pass_on(reader, back))
                both.create_task(_pass_on(onward, writer))
        finally:
            del self._ways[task]
            writer.transport.abort()
            back.transport.abort()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()
