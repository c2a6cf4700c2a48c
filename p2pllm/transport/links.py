"""All links of a peer: dialling, accepting, sending.

Addressed by peer id only. A link is opened on demand and then stays; both its sides have proved who they are,
and nobody on the way can read or change what they say, unless encryption was left out.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import structlog
from aiohttp import WSMsgType, web

from p2pllm.config import Address
from p2pllm.errors import LinkError
from p2pllm.identity import Identity, PeerId
from p2pllm.records import SwarmKey
from p2pllm.transport.certificate import Certificate
from p2pllm.transport.client import MISMATCH, Client
from p2pllm.transport.dialling import dial_any
from p2pllm.transport.frames import DEFAULT_LIMITS, Limits
from p2pllm.transport.greetings import Greetings
from p2pllm.transport.handshake import NONCE_BYTES, Acceptor, Dialer, Terms
from p2pllm.transport.link import Link, Socket, cut, shut
from p2pllm.transport.messages import Message

__all__ = ["HEARTBEAT_S", "MAX_LINKS", "STALL_S", "Links"]

HEARTBEAT_S = 15.0
"""Silence after which a socket is probed; it is dead when nothing comes back for half as long."""

STALL_S = 30.0
"""A peer may take this long to make room for one frame."""

MAX_LINKS = 1024
"""Links at one time; who dials is turned away from half as many on, so that strangers never keep this peer
from dialling those that it needs.
"""

_HELLO_HEADER = "P2PLLM-Hello"
_HANDSHAKE_S = 2.0
_CLOSE_S = 0.5
_END_S = 3.0
_MAX_GREETINGS = 64
"""Dialling peers that may be in the handshake at one time."""

log = structlog.get_logger()


class Links:
    """The links of ``identity`` within ``swarm`` (20 bytes).

    ``certificate`` is what the server behind `accept` shows; with None, links are not encrypted. ``secret``
    is the key of a private swarm.

    ``on_message`` gets every message but Ping and Pong, in order per sender, and must neither block nor
    raise. ``on_down`` is called once for each link that ends while this object is open.
    """

    def __init__(
        self,
        identity: Identity,
        swarm: bytes,
        *,
        certificate: Certificate | None,
        secret: SwarmKey | None = None,
        on_message: Callable[[PeerId, Message], None],
        on_down: Callable[[PeerId], None],
        limits: Limits = DEFAULT_LIMITS,
        max_links: int = MAX_LINKS,
        heartbeat_s: float = HEARTBEAT_S,
        stall_s: float = STALL_S,
    ) -> None:
        self._identity = identity
        self._terms = Terms(swarm, certificate.fingerprint if certificate else b"", secret)
        self._on_message = on_message
        self._on_down = on_down
        self._limits = limits
        self._max_links = max_links
        # aiohttp refuses a message of exactly the size that it is given.
        self._max_message = limits.frame + 1
        self._heartbeat_s = heartbeat_s
        self._stall_s = stall_s
        self._client = Client(close_s=_CLOSE_S, heartbeat_s=heartbeat_s, max_message=self._max_message)
        self._links: dict[PeerId, Link] = {}
        self._dials: dict[PeerId, asyncio.Task[str]] = {}
        self._carriers: set[asyncio.Task[Any]] = set()
        self._greetings = Greetings(_MAX_GREETINGS, _HANDSHAKE_S)
        self._closed = False

    @property
    def upload(self) -> float:
        """Bytes per second at which large frames get to others, in the middle of all links; 0: not known.

        The middle, because single peers may be slow at their end, or lie.
        """
        known = [link.gauge.value for link in self._links.values() if link.gauge.value > 0.0]
        return statistics.median(known) if known else 0.0

    def upload_to(self, peer: PeerId) -> float:
        """Bytes per second at which a large frame gets to a peer that is not busy; 0: not known."""
        link = self._links.get(peer)
        return link.gauge.unhindered if link is not None else 0.0

    def peers(self) -> set[PeerId]:
        """Return whom there is a link to."""
        return set(self._links)

    def send(self, peer: PeerId, message: Message) -> None:
        """Queue a message for a peer; one for the own id arrives on the loop's next turn.

        Raises LinkError if there is no link or too much waits on it, FrameError if the message is too large.
        """
        if peer == self._identity.peer_id:
            asyncio.get_running_loop().call_soon(self._on_message, peer, message)
        else:
            self._link(peer).send(message)

    async def drain(self, peer: PeerId, timeout: float = 30.0) -> None:
        """Wait until a large message can be sent; raises LinkError if the link is not that fast, or gone."""
        if peer != self._identity.peer_id:
            await self._link(peer).drain(timeout)

    async def ping(self, peer: PeerId, timeout: float = 1.0) -> float:
        """Return the round trip to a linked peer in seconds; raises LinkError if it is over ``timeout``."""
        if peer == self._identity.peer_id:
            return 0.0
        return await self._link(peer).ping(secrets.randbits(64), timeout)

    async def ensure(
        self, peer: PeerId, addresses: Sequence[Address], certificate: bytes, timeout: float = 2.0
    ) -> None:
        """See that there is a link, dialling the addresses in order until one answers as this peer.

        One that does not answer soon does not keep the next from being tried beside it. ``certificate`` is
        the fingerprint in the peer's record, empty if it links without encryption. Calls at the same time
        share the first one's dial. Raises LinkError after ``timeout`` seconds or when all fail.
        """
        if self._closed:
            raise LinkError("this peer is shutting down")
        if peer == self._identity.peer_id or peer in self._links:
            return
        if bool(certificate) != bool(self._terms.certificate):
            other, own = ("encrypts", "does not") if certificate else ("does not encrypt", "does")
            raise LinkError(f"peer {peer[:8]} {other} its links and this one {own}: {MISMATCH}")
        dial = self._dials.get(peer)
        if dial is None:
            # It ends a little before the callers' own deadline, so that they learn why it was in vain.
            dial = asyncio.create_task(
                dial_any(tuple(addresses), partial(self._open, peer, certificate), 0.9 * timeout)
            )
            self._dials[peer] = dial
            dial.add_done_callback(lambda _: self._dials.pop(peer))
        done, _ = await asyncio.wait({dial}, timeout=timeout)
        if peer in self._links:
            return
        failure = f"no answer within {timeout:g} s"
        if done and not dial.cancelled():
            failure = dial.result() or "it hung up at once"
        raise LinkError(f"cannot reach peer {peer[:8]}: {failure}")

    async def accept(self, request: web.Request) -> web.WebSocketResponse:
        """Handle ``GET /link``: check who dials, then carry the link until it ends."""
        if self._closed:
            raise web.HTTPServiceUnavailable
        socket = web.WebSocketResponse(
            timeout=_CLOSE_S,
            heartbeat=self._heartbeat_s,
            compress=False,
            max_msg_size=self._max_message,
            autoping=False,
        )
        try:
            await socket.prepare(request)
        except OSError:
            raise web.HTTPBadRequest from None  # nobody is left to read it
        try:
            async with self._greetings.another():
                peer = await self._greet(request.headers.get(_HELLO_HEADER, ""), socket)
            link = self._attach(peer, socket, most=self._max_links // 2)
        except (LinkError, OSError) as error:
            reason = str(error) or "no answer"
            log.info("link_refused", address=request.remote, reason=reason)
            await shut(socket, reason)
            return socket
        # The handler's own task carries the socket; `close` waits for it like for those of dialled ones.
        await self._carry(link, socket)
        return socket

    async def close(self) -> None:
        """Send what is queued, part from all peers and stop; bounded in time, and `on_down` is not called."""
        self._closed = True
        for dial in self._dials.values():
            dial.cancel()
        await asyncio.gather(*(link.close("the peer is leaving") for link in self._links.values()))
        self._links.clear()
        tasks = {*self._dials.values(), *self._carriers}
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=_END_S)
            for task in late:
                task.cancel()
        await self._client.close()

    def _link(self, peer: PeerId) -> Link:
        link = self._links.get(peer)
        if link is None:
            raise LinkError(f"no link to peer {peer[:8]}")
        return link

    async def _open(self, peer: PeerId, certificate: bytes, address: Address) -> None:
        """Dial one address, prove and check identities, and set the link going."""
        terms = replace(self._terms, certificate=certificate)
        dialer = Dialer(self._identity, terms, peer, os.urandom(NONCE_BYTES))
        socket = await self._client.open(address, certificate, {_HELLO_HEADER: dialer.hello().hex()})
        try:
            proof = dialer.prove(await _flight(socket))
            if peer in self._links:
                raise LinkError("already linked")
            await socket.send_bytes(proof)
            link = self._attach(peer, socket, most=self._max_links)
        except LinkError as error:
            await shut(socket, str(error))
            raise
        except BaseException:
            cut(socket)
            raise
        self._carriers.add(asyncio.create_task(self._carry(link, socket)))

    async def _greet(self, hello: str, socket: web.WebSocketResponse) -> PeerId:
        """Return who is dialling, once that is proved."""
        acceptor = Acceptor(self._identity, self._terms, os.urandom(NONCE_BYTES))
        try:
            reply = acceptor.reply(bytes.fromhex(hello))
        except ValueError:
            raise LinkError("no handshake in hexadecimal") from None
        await socket.send_bytes(reply)
        return acceptor.admit(await _flight(socket))

    def _attach(self, peer: PeerId, socket: Socket, *, most: int) -> Link:
        """Add an authenticated socket to the link of its peer, or make it the first of a new one, unless
        there are as many as ``most``.
        """
        link = self._links.get(peer)
        if self._closed:
            raise LinkError("the peer is leaving")
        if link is None:
            if len(self._links) >= most:
                raise LinkError("the peer has too many links")
            link = Link(
                peer,
                limits=self._limits,
                stall_s=self._stall_s,
                on_message=self._on_message,
                on_down=self._forget,
            )
        elif link.full:
            raise LinkError("too many sockets of one peer")
        link.attach(socket)
        if peer not in self._links:
            self._links[peer] = link
            log.info("link_up", peer=peer[:8])
        dial = self._dials.get(peer)
        if dial is not None:
            # Whoever waits for it has what it wants, and so have those who dialled us.
            dial.cancel()
        return link

    async def _carry(self, link: Link, socket: Socket) -> None:
        """Run an attached socket to its end, in a task that `close` knows of."""
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._carriers.add(task)
        try:
            await link.run(socket)
        finally:
            self._carriers.discard(task)

    def _forget(self, link: Link) -> None:
        if self._links.get(link.peer) is link:
            del self._links[link.peer]
        if not self._closed:
            self._on_down(link.peer)


async def _flight(socket: Socket) -> bytes:
    """Return the other side's next part of the handshake."""
    received = await socket.receive()
    if received.type is WSMsgType.BINARY:
        return bytes(received.data)
    raise LinkError(str(received.extra or "it broke off the handshake"))
