"""One link: the sockets of a pair of peers, what waits to be sent, and what comes in.

Two peers that dial each other at the same moment end up with two sockets. Each side then sends on the one it
had first and reads both, so order holds in each direction with nothing to negotiate. A socket that breaks may
have lost frames, so it takes the whole link down: whoever uses the link hears of it once, and none of its
sessions waits for a frame that will never come.

Whoever sends more than it may, by the work it is, is not read for a moment, and TCP holds it back.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket as sockets
import time
from collections.abc import Callable
from typing import TypeAlias

import structlog
from aiohttp import ClientWebSocketResponse, WSCloseCode, WSMsgType
from aiohttp.web import WebSocketResponse

from p2pllm.errors import FrameError, LinkError
from p2pllm.identity import PeerId
from p2pllm.transport.frames import Limits, decode, encode
from p2pllm.transport.messages import Message, Ping, Pong
from p2pllm.transport.meters import Gauge, Quota

__all__ = ["MAX_SOCKETS", "Link", "Socket", "cut", "shut"]

MAX_SOCKETS = 3
"""Sockets in one link."""

MAX_QUEUED_FRAMES = 4096
"""Frames that may wait for one peer; their bytes are bounded by the largest frame."""

_WORK_S = 0.01
_WORK_PERIOD_S = 0.025
"""Seconds of work in so many seconds that one peer may give us: many times what chains need."""

_FRAME_S = 40e-6
"""The least that a frame counts for: most of the work of a small one is done before we see it."""

_LARGE_BYTES = 128 * 1024
"""A frame from this size on tells how fast the way to the peer is."""

_LAST_PING = 0
"""The nonce of the one before an orderly end."""

_CLOSE_S = 1.0
"""For the closing handshake, and for what still waits to be sent."""

Socket: TypeAlias = ClientWebSocketResponse | WebSocketResponse

log = structlog.get_logger()


class Link:
    """The link to ``peer``. ``on_down`` is called once, when it ends by anything but `close`."""

    def __init__(
        self,
        peer: PeerId,
        *,
        limits: Limits,
        stall_s: float,
        on_message: Callable[[PeerId, Message], None],
        on_down: Callable[[Link], None],
    ) -> None:
        self.peer = peer
        self._limits = limits
        self._stall_s = stall_s
        self._on_message = on_message
        self._on_down = on_down
        self._sockets: dict[Socket, sockets.socket] = {}
        self.gauge = Gauge()
        """How fast large frames get to the peer."""
        self._quota = Quota(_WORK_S, _WORK_PERIOD_S)
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue(MAX_QUEUED_FRAMES)
        self._outbox_bytes = 0
        self._room = asyncio.Event()
        self._room.set()
        self._pings: dict[int, asyncio.Future[float]] = {}
        self._ended = ""
        """Why the link ended; empty while it is up."""

    @property
    def full(self) -> bool:
        """Whether the link takes no further socket."""
        return len(self._sockets) >= MAX_SOCKETS

    def attach(self, socket: Socket) -> None:
        """Add an authenticated socket for `run` to carry; raises LinkError if it is already broken."""
        descriptor = _twin(socket)
        if descriptor is None:
            raise LinkError(f"lost peer {self.peer[:8]} during the handshake")
        self._sockets[socket] = descriptor

    async def run(self, socket: Socket) -> None:
        """Carry an attached socket until the link ends; the first one also sends."""
        sends = next(iter(self._sockets)) is socket
        try:
            async with asyncio.TaskGroup() as tasks:
                writer = tasks.create_task(self._write(socket)) if sends else None
                try:
                    await self._read(socket)
                finally:
                    self._end("the connection was dropped", still_open=socket)
                    if writer is not None:
                        writer.cancel()
            await shut(socket, self._ended)
        finally:
            _end_connection(self._sockets.pop(socket))

    def send(self, message: Message) -> None:
        """Queue a message; raises LinkError when too much waits, FrameError if it can never be sent."""
        frame = encode(message, self._limits)
        if self._outbox.full() or self._outbox_bytes + len(frame) > self._limits.frame:
            raise LinkError(f"the link to peer {self.peer[:8]} is congested")
        self._outbox.put_nowait(frame)
        self._count(len(frame))

    async def drain(self, timeout: float) -> None:
        """Wait until at most half of what may be queued is; raises LinkError after ``timeout`` seconds."""
        if not self._room.is_set():
            try:
                async with asyncio.timeout(timeout):
                    await self._room.wait()
            except TimeoutError:
                raise LinkError(f"the link to peer {self.peer[:8]} is congested") from None
        if self._ended:
            raise LinkError(f"the link to peer {self.peer[:8]} went down: {self._ended}")

    def _count(self, queued: int) -> None:
        self._outbox_bytes += queued
        if self._outbox_bytes > self._limits.frame // 2:
            self._room.clear()
        else:
            self._room.set()

    async def ping(self, nonce: int, timeout: float) -> float:
        """Return the seconds until the peer answered; raises LinkError if it does not within ``timeout``."""
        answered: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._pings[nonce] = answered
        # Not the loop's clock: uvloop's ticks only once a millisecond.
        started = time.perf_counter()
        try:
            self.send(Ping(nonce))
            async with asyncio.timeout(timeout):
                seconds = await answered - started
        except TimeoutError:
            raise LinkError(f"peer {self.peer[:8]} did not answer a ping within {timeout:g} s") from None
        finally:
            del self._pings[nonce]
        self.gauge.pinged(seconds)
        return seconds

    async def close(self, reason: str) -> None:
        """Send what is queued, then part from the peer; bounded in time."""
        if self._ended:
            return
        with contextlib.suppress(TimeoutError, LinkError):
            async with asyncio.timeout(_CLOSE_S):
                await self._outbox.join()
                # The answer says that everything has arrived.
                await self.ping(_LAST_PING, _CLOSE_S)
        self._ended = self._ended or reason
        await asyncio.gather(*(shut(socket, reason) for socket in self._sockets))

    async def _read(self, socket: Socket) -> None:
        """Hand on what comes in until the socket or the link ends."""
        try:
            while not self._ended:
                received = await socket.receive()
                work = _FRAME_S
                if received.type is WSMsgType.BINARY:
                    # Not what passes meanwhile: others may be at work on this machine.
                    started = time.thread_time()
                    self._receive(decode(received.data, self._limits))
                    work = max(work, time.thread_time() - started)
                elif received.type is WSMsgType.PING:
                    with contextlib.suppress(OSError):
                        async with asyncio.timeout(self._stall_s):
                            await socket.pong(received.data)
                elif received.type is WSMsgType.TEXT:
                    raise FrameError("text instead of a frame")
                elif received.type is not WSMsgType.PONG:
                    self._end(str(received.extra or received.data or "closed"), still_open=socket)
                pause = self._quota.take(work, time.monotonic())
                if pause > 0.0:
                    await asyncio.sleep(pause)
        except FrameError as error:
            self._end(f"malformed frame: {error}", still_open=socket)
        except Exception:
            # A bug of ours that this peer's frame brought out: let it cost this link and no other.
            log.exception("message_handler_failed", peer=self.peer[:8])
            self._end("internal error", still_open=socket)

    def _receive(self, message: Message) -> None:
        if isinstance(message, Ping):
            # A peer that asks faster than it reads gets no answer.
            with contextlib.suppress(LinkError):
                self.send(Pong(message.nonce))
        elif isinstance(message, Pong):
            now, answered = time.perf_counter(), self._pings.get(message.nonce)
            if answered is not None and not answered.done():
                answered.set_result(now)
            self.gauge.answered(message.nonce, now)
        else:
            self._on_message(self.peer, message)

    async def _write(self, socket: Socket) -> None:
        """Send what is queued, in order, while the peer keeps reading."""
        clock = asyncio.get_running_loop().time
        try:
            # One deadline that moves: most frames are gone at once, and a token should not pay for it.
            async with asyncio.timeout(None) as stalled:
                while True:
                    stalled.reschedule(None)
                    frame = await self._outbox.get()
                    stalled.reschedule(clock() + self._stall_s)
                    await self._put(socket, frame)
                    self._count(-len(frame))
                    self._outbox.task_done()
        except TimeoutError:
            self._end(f"it read nothing for {self._stall_s:g} s")
        except OSError as error:
            self._end(f"the connection broke ({error})")

    async def _put(self, socket: Socket, frame: bytes) -> None:
        """Send a frame, and behind a large one a ping that tells when it has arrived."""
        large = len(frame) >= _LARGE_BYTES
        nonce = secrets.randbits(64) if large else 0
        is_timed = large and self.gauge.sent(nonce, len(frame), time.perf_counter())
        await socket.send_bytes(frame)
        if is_timed:
            await socket.send_bytes(encode(Ping(nonce), self._limits))

    def _end(self, reason: str, *, still_open: Socket | None = None) -> None:
        """Take the link down, once; ``still_open`` can still be told why, the others are cut."""
        if self._ended:
            return
        self._ended = reason
        self._room.set()
        log.info("link_down", peer=self.peer[:8], reason=reason)
        for socket, descriptor in self._sockets.items():
            if socket is not still_open:
                _shutdown(descriptor)
        for answered in self._pings.values():
            if not answered.done():
                answered.set_exception(LinkError(f"the link to peer {self.peer[:8]} went down: {reason}"))
        self._on_down(self)


async def shut(socket: Socket, reason: str) -> None:
    """Close a socket, telling the other side why; bounded in time, and harmless if it is closed."""
    descriptor = _twin(socket)
    # A WebSocket close frame has room for 123 bytes of text.
    text = reason.encode("ascii", "replace")[:120]
    try:
        with contextlib.suppress(OSError):
            async with asyncio.timeout(_CLOSE_S):
                await socket.close(code=WSCloseCode.GOING_AWAY, message=text)
    finally:
        _end_connection(descriptor)


def cut(socket: Socket) -> None:
    """End a socket's connection at once, without a word."""
    _end_connection(_twin(socket))


def _twin(socket: Socket) -> sockets.socket | None:
    """Return a second descriptor of a socket's connection; None if it has none any more.

    By it a connection can be ended even when its peer reads nothing, and a TLS transport would wait for it.
    """
    raw = socket.get_extra_info("socket")
    if raw is None or raw.fileno() < 0:
        return None
    return sockets.fromfd(raw.fileno(), raw.family, raw.type)


def _end_connection(descriptor: sockets.socket | None) -> None:
    if descriptor is not None:
        _shutdown(descriptor)
        descriptor.close()


def _shutdown(descriptor: sockets.socket) -> None:
    """End a connection, whatever its transport still has to send; the transport hears of it by itself."""
    with contextlib.suppress(OSError):
        descriptor.shutdown(sockets.SHUT_RDWR)
