"""Questions and answers over one socket: asks others with deadlines, answers them within limits.

The package's framing and hooks stay; its request path is replaced, because it matches replies by nonce
alone, waits 5 s for each, and raises on what strangers send. Here a datagram is parsed, checked and
answered on the spot, or it is dropped without a trace.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from kademlia.node import Node
from kademlia.protocol import KademliaProtocol

from p2pllm.dht.contacts import Address, is_usable
from p2pllm.dht.limits import Limits
from p2pllm.dht.liveness import Liveness
from p2pllm.dht.wire import NONCE_BYTES, TOKEN_BYTES, Reply, Request, encode_reply, encode_request, parse
from p2pllm.errors import RecordError

__all__ = ["Exchange", "MalformedRequestError", "Wrap"]

TRIES: Final = 2
LATE_S: Final = 2.0
LAG_S: Final = 0.03
MAX_LAGS: Final = 6

TOKEN_S: Final = 600.0
"""So long a token is given out, and taken for as long again: addresses change hands."""

Wrap: TypeAlias = Callable[[asyncio.DatagramTransport], asyncio.DatagramTransport]
"""Puts something between a node and its socket."""


class MalformedRequestError(Exception):
    """The arguments are not what the method takes."""


@dataclass(slots=True)
class _Question:
    datagram: bytes
    address: Address
    sent: float
    timeout: float
    reply: asyncio.Future[Reply | None]
    tries: int = 1
    lags: int = 0
    due: float = 0.0
    timer: asyncio.TimerHandle | None = None


class Exchange(KademliaProtocol, ABC):  # type: ignore[misc]  # the package ships no types
    """The datagram protocol of one socket, without a word of what is asked.

    Beware: the package's class answers any unknown public attribute with a function that sends a request.
    """

    def __init__(
        self, source_node: Node, storage: object, ksize: int, *, clock: Callable[[], float], wrap: Wrap | None
    ) -> None:
        super().__init__(source_node, storage, ksize)
        self.liveness = Liveness()
        self.lost = asyncio.Event()
        self._id: bytes = source_node.id
        self._clock = clock
        self._wrap = wrap
        self._secret = os.urandom(16)
        self._phase = int.from_bytes(self._secret[:2]) / 2**16  # nodes do not all change tokens at once
        self._limits = Limits()
        self._questions: dict[bytes, _Question] = {}
        self._congested = False

    @abstractmethod
    def _answer(self, request: Request, address: Address, *, proven: bool) -> object:
        """What to reply: None for nothing but a token. ``proven``: the sender receives at ``address``.

        Raises MalformedRequestError or RecordError for what deserves no answer.
        """

    @abstractmethod
    def _heard(self, sender: bytes, address: Address, *, asks: bool) -> None:
        """Somebody at ``address`` asked us, or answered, who says to be ``sender``."""

    @abstractmethod
    def _missed(self, address: Address) -> None:
        """Nobody at ``address`` answered."""

    # Asking

    async def ask(self, address: Address, method: str, *arguments: object) -> Reply | None:
        """The reply from ``address``, or None if none came in time.

        Asks up to twice with one nonce, so that an answer to either try counts.
        """
        if self.transport.is_closing():
            return None
        nonce = os.urandom(NONCE_BYTES)
        datagram = encode_request(nonce, method, self.liveness.token(address), self._id, *arguments)
        reply: asyncio.Future[Reply | None] = asyncio.get_running_loop().create_future()
        question = _Question(datagram, address, self._clock(), self.liveness.timeout(address), reply)
        self._questions[nonce] = question
        try:
            self._try(nonce, question)
            return await reply
        finally:
            if not reply.done() or reply.cancelled() or reply.result() is not None:
                self._drop(nonce)

    def _try(self, nonce: bytes, question: _Question) -> None:
        self._send(question.datagram, question.address)
        self._wait(nonce, question)

    def _wait(self, nonce: bytes, question: _Question) -> None:
        loop = asyncio.get_running_loop()
        question.due = loop.time() + question.timeout
        question.timer = loop.call_at(question.due, self._give_up, nonce, question)

    def _give_up(self, nonce: bytes, question: _Question) -> None:
        if question.reply.done():
            return
        if asyncio.get_running_loop().time() > question.due + LAG_S and question.lags < MAX_LAGS:
            # It is this process that is late: the reply may have come long ago, and wait to be read.
            question.lags += 1
            self._wait(nonce, question)
        elif question.tries < TRIES:
            question.tries += 1
            self._try(nonce, question)
        else:
            # Too late an answer still tells that the node lives, and how far away.
            question.timer = asyncio.get_running_loop().call_later(LATE_S, self._drop, nonce)
            question.reply.set_result(None)
            self.liveness.missed(question.address, self._clock())
            self._missed(question.address)

    def _drop(self, nonce: bytes) -> None:
        question = self._questions.pop(nonce, None)
        if question is not None and question.timer is not None:
            question.timer.cancel()

    # Answering

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        """Take in a datagram. Nothing in it can raise."""
        address: Address = addr[:2]
        if not (is_usable(address[0]) and address[1]):
            return
        match parse(data):
            case Request() as request:
                self._on_request(request, address, len(data))
            case Reply() as reply:
                self._on_reply(reply, address)

    def _on_reply(self, reply: Reply, address: Address) -> None:
        question = self._questions.get(reply.nonce)
        if question is None or question.address != address:
            return
        now = self._clock()
        self.liveness.answered(address, now - question.sent, reply.token, now)
        self._heard(reply.sender, address, asks=False)
        if question.reply.done():
            self._drop(reply.nonce)
        else:
            question.reply.set_result(reply)

    def _on_request(self, request: Request, address: Address, size: int) -> None:
        now = self._clock()
        token = self._token(address)
        proven = request.token == token or request.token == self._token(address, age=1)
        if not self._limits.allows(address, now, proven=proven):
            return
        if proven:
            self.liveness.asked(address, now)
            self._heard(request.sender, address, asks=True)
        try:
            result = self._answer(request, address, proven=proven)
        except (RecordError, MalformedRequestError):
            if proven:
                self._limits.offended(address, now)
            return
        reply = encode_reply(request.nonce, self._id, token, result)
        if not proven and len(reply) > size:
            reply = encode_reply(request.nonce, self._id, token, None)
        self._send(reply, address)

    def _token(self, address: Address, *, age: int = 0) -> bytes:
        """What the node at ``address`` has to show, now or ``age`` changes ago."""
        period = int(self._clock() / TOKEN_S + self._phase) - age
        proof = f"{address[0]} {address[1]} {period}".encode()
        return hashlib.blake2b(proof, key=self._secret, digest_size=TOKEN_BYTES).digest()

    # The socket

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:
        """The socket is open."""
        self.transport = self._wrap(transport) if self._wrap else transport

    def connection_lost(self, _exc: Exception | None) -> None:
        """The socket is closed."""
        self.lost.set()

    def pause_writing(self) -> None:
        """The system takes no more for now."""
        self._congested = True

    def resume_writing(self) -> None:
        """The system has caught up."""
        self._congested = False

    def _send(self, datagram: bytes, address: Address) -> None:
        if not self._congested:  # a queue would only make everything late
            self.transport.sendto(datagram, address)

    def stop(self) -> None:
        """Close the socket and answer every open question with None."""
        for nonce, question in list(self._questions.items()):
            self._drop(nonce)
            if not question.reply.done():
                question.reply.set_result(None)
        self.transport.abort()

    async def close(self) -> None:
        """Stop, and wait until the socket is closed."""
        self.stop()
        await self.lost.wait()
