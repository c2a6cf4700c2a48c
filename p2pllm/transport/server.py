"""The aiohttp server in a thin wrapper, used for the link endpoint and for the API alike."""

from __future__ import annotations

import errno

from aiohttp import web

from p2pllm.errors import PortTakenError, UsageError

__all__ = ["Server", "serve"]

_DRAIN_S = 1.0
"""How long handlers may go on once the server closes; then they are cancelled."""


class Server:
    """A listening application; ``port`` is the real one when 0 was asked for."""

    def __init__(self, runner: web.AppRunner) -> None:
        self._runner = runner
        self.port: int = runner.addresses[0][1]

    async def close(self) -> None:
        """Stop listening, give running handlers a moment, then cancel them."""
        await self._runner.cleanup()


async def serve(app: web.Application, host: str, port: int, *, flag: str = "--port") -> Server:
    """Listen on ``host``:``port`` (0 = any free one). A handler is cancelled when its client goes away.

    Raises UsageError naming the address and the ``flag`` to change when it cannot be had.
    """
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=_DRAIN_S)
    await runner.setup()
    try:
        # uvloop would take a port that is too large modulo 65536.
        if not 0 <= port <= 65535:
            raise OSError("no such port")
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        # asyncio puts the address before the system's own words.
        reason = (error.strerror or str(error)).rpartition(": ")[2]
        kind = PortTakenError if error.errno == errno.EADDRINUSE else UsageError
        raise kind(f"cannot listen on {host}:{port} ({reason}): choose another address with {flag}") from None
    return Server(runner)
