"""The HTTP side of a dial: from an address to an open WebSocket, or to one line that says why not."""

from __future__ import annotations

import ssl

import aiohttp
from aiohttp import ClientWebSocketResponse, ClientWSTimeout
from yarl import URL

from p2pllm.config import Address
from p2pllm.errors import LinkError
from p2pllm.transport.reasons import reason_of

__all__ = ["LINK_PATH", "MISMATCH", "Client"]

LINK_PATH = "/link"
"""Where a peer's link server takes dials."""

MISMATCH = "give --insecure-links to all peers of a swarm or to none"


class Client:
    """Opens WebSockets to the link servers of other peers.

    ``close_s`` bounds the closing handshake, ``heartbeat_s`` is the silence after which a socket is probed,
    and ``max_message`` the size in bytes from which on a message is refused.
    """

    def __init__(self, *, close_s: float, heartbeat_s: float, max_message: int) -> None:
        self._close_s = close_s
        self._heartbeat_s = heartbeat_s
        self._max_message = max_message
        self._session: aiohttp.ClientSession | None = None

    async def open(
        self, address: Address, certificate: bytes, headers: dict[str, str]
    ) -> ClientWebSocketResponse:
        """Dial one address; a name is looked up anew, and all that it resolves to is tried.

        ``certificate`` is the fingerprint that the other side's must have, checked before anything is said;
        empty to go without encryption. Raises LinkError.
        """
        host, port = address
        try:
            return await self._opened().ws_connect(
                URL.build(scheme="https" if certificate else "http", host=host, port=port, path=LINK_PATH),
                headers=headers,
                ssl=aiohttp.Fingerprint(certificate) if certificate else True,
                timeout=ClientWSTimeout(ws_close=self._close_s),
                heartbeat=self._heartbeat_s,
                max_msg_size=self._max_message,
                autoping=False,
            )
        except aiohttp.ServerFingerprintMismatch:
            raise LinkError(
                "it shows another certificate than its record names: either it has restarted just now, "
                "or somebody stands in between"
            ) from None
        except (aiohttp.ClientSSLError, ssl.SSLError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise LinkError(f"no encryption could be agreed on ({reason}): {MISMATCH}") from None
        except aiohttp.ClientConnectorError as error:
            raise LinkError(reason_of(error.os_error)) from None
        except (aiohttp.WSServerHandshakeError, ValueError) as error:
            raise LinkError(str(error)) from None
        except (aiohttp.ClientError, OSError) as error:
            hint = "" if certificate else f"; if it encrypts its links, {MISMATCH}"
            raise LinkError(f"{str(error) or 'it hung up'}{hint}") from None

    async def close(self) -> None:
        """Forget all connections that are not in use."""
        if self._session is not None:
            await self._session.close()

    def _opened(self) -> aiohttp.ClientSession:
        """Return the HTTP client, made on first use because it belongs to a running loop."""
        if self._session is None:
            tracing = aiohttp.TraceConfig()
            tracing.on_request_redirect.append(_refuse_redirect)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, use_dns_cache=False),
                cookie_jar=aiohttp.DummyCookieJar(),
                trace_configs=[tracing],
            )
        return self._session


async def _refuse_redirect(*_: object) -> None:
    """A peer answers itself; following it elsewhere would let strangers aim our requests."""
    raise LinkError("it redirects instead of answering")
