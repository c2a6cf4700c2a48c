"""One node's side of the conversation: asks others with deadlines, answers them within limits.

The package's framing and hooks stay; its request path is replaced, because it matches replies by nonce
alone, waits 5 s for each, and raises on what strangers send. Here a datagram is parsed, checked and
answered on the spot, or it is dropped without a trace.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kademlia.node import Node
from kademlia.protocol import KademliaProtocol

from p2pllm.dht.liveness import Liveness, RateLimit
from p2pllm.dht.lookup import Answer
from p2pllm.dht.storage import Records
from p2pllm.dht.table import ContactTable
from p2pllm.dht.wire import (
    ID_BYTES,
    TOKEN_BYTES,
    Address,
    Contact,
    Reply,
    Request,
    encode_reply,
    encode_request,
    pack_contact,
    parse,
    parse_contact,
)
from p2pllm.errors import RecordError

__all__ = ["Fetched", "K", "RegistryProtocol"]

K: Final = 20
"""Contacts in a bucket, and in an answer to find_node."""

TRIES: Final = 2
LATE_S: Final = 2.0
REQUESTS_PER_S: Final = 500.0
PAGE_BYTES: Final = 1100

_MAX_GREETINGS = 32


@dataclass(frozen=True, slots=True)
class Fetched:
    """A page as another node gave it: nothing of it has been verified.

    ``items`` are (remaining life in seconds, raw record); ``instance`` changes when the node has restarted
    and counts its versions anew.
    """

    instance: bytes
    version: int
    more: bool
    items: list[tuple[float, bytes]]


@dataclass(slots=True)
class _Question:
    address: Address
    sent: float
    reply: asyncio.Future[Reply | None]
    forget: asyncio.TimerHandle | None = None


class RegistryProtocol(KademliaProtocol):  # type: ignore[misc]  # the package ships no types
    """The datagram protocol of a DhtNode.

    Beware: the package's class answers any unknown public attribute with a function that sends a request.
    """

    def __init__(
        self,
        source_node: Node,
        storage: Records,
        *,
        clock: Callable[[], float],
        on_contact: Callable[[Contact], None],
    ) -> None:
        super().__init__(source_node, storage, K)
        self.liveness = Liveness()
        self.router = ContactTable(self, K, source_node, self._usable)
        self.lost = asyncio.Event()
        self._id: bytes = source_node.id
        self._records = storage
        self._clock = clock
        self._on_contact = on_contact
        self._secret = os.urandom(16)
        self._limit = RateLimit(REQUESTS_PER_S, 2 * REQUESTS_PER_S)
        self._questions: dict[bytes, _Question] = {}
        self._greetings: dict[Address, asyncio.Task[None]] = {}
        self._answers: dict[str, Callable[[Address, list[object]], object]] = {
            "ping": self._answer_ping,
            "find_node": self._answer_find_node,
            "rput": self._answer_rput,
            "rget": self._answer_rget,
        }

    # Asking

    async def ping(self, address: Address) -> Contact | None:
        """Who is at ``address``, or None for no answer. Asks even an address that was silent a moment ago."""
        reply = await self._exchange(address, "ping")
        return Contact(reply.sender, *address) if reply else None

    async def find_node(self, contact: Contact, target: bytes) -> Answer | None:
        """Who answers at the contact's address and the contacts it knows nearest to ``target``."""
        reply = await self._ask(contact, "find_node", target)
        if reply is None or not isinstance(reply.result, list):
            return None
        named: list[Contact] = []
        for item in reply.result[:K]:
            one = parse_contact(item, named_by=contact.host)
            if one is not None and one.id != self._id:
                known = self.router.get(one.id)
                named.append(known if known is not None and self._usable(known) else one)
        return Contact(reply.sender, *contact.address), list(filter(self._usable, named))

    async def store(self, contact: Contact, key: bytes, raw: bytes, life: float) -> bool | None:
        """Whether the contact holds the record now, None for no answer; ``life`` is what it has left (s)."""
        reply = await self._ask(contact, "rput", key, round(life * 1000), raw)
        return None if reply is None else reply.result is True

    async def fetch(self, contact: Contact, key: bytes, since: int) -> Fetched | None:
        """A page of the contact's records under ``key`` with versions above ``since``, None for no answer."""
        reply = await self._ask(contact, "rget", key, since)
        if reply is None:
            return None
        match reply.result:
            case [int(version), bool(more), [*packed]] if version >= since:
                items: list[tuple[float, bytes]] = []
                for item in packed:
                    match item:
                        case [int(life_ms), bytes(raw)]:
                            items.append((life_ms / 1000, raw))
                return Fetched(reply.token, version, more, items)
        return None

    async def _ask(self, contact: Contact, method: str, *arguments: object) -> Reply | None:
        if self.liveness.silent(contact.address, self._clock()):
            return None
        reply = await self._exchange(contact.address, method, *arguments)
        if reply is not None and reply.result is None:
            # Our token was missing or stale; the reply brought a good one.
            reply = await self._exchange(contact.address, method, *arguments)
        return reply

    async def _exchange(self, address: Address, method: str, *arguments: object) -> Reply | None:
        """Ask up to twice with one nonce, so that an answer to either try counts."""
        if self.transport.is_closing():
            return None
        nonce = os.urandom(20)
        datagram = encode_request(nonce, method, self.liveness.token(address), self._id, *arguments)
        loop = asyncio.get_running_loop()
        question = _Question(address, self._clock(), loop.create_future())
        self._questions[nonce] = question
        timeout = self.liveness.timeout(address)
        try:
            for _ in range(TRIES):
                self.transport.sendto(datagram, address)
                await asyncio.wait([question.reply], timeout=timeout)
                if question.reply.done():
                    return question.reply.result()
            self._miss(address)
            # Too late an answer still tells that the node lives, and how far away.
            question.forget = loop.call_later(LATE_S, self._questions.pop, nonce, None)
            return None
        finally:
            if question.forget is None:
                del self._questions[nonce]

    # Answering

    def datagram_received(self, data: bytes, addr: Address) -> None:
        """Take in a datagram. Nothing in it can raise."""
        match parse(data):
            case Request() as request:
                self._on_request(request, addr)
            case Reply() as reply:
                self._on_reply(reply, addr)

    def connection_lost(self, _exc: Exception | None) -> None:
        """The socket is closed."""
        self.lost.set()

    def _on_reply(self, reply: Reply, address: Address) -> None:
        question = self._questions.get(reply.nonce)
        if question is None or question.address != address:
            return
        now = self._clock()
        self.liveness.answered(address, now - question.sent, reply.token, now)
        self._admit(Contact(reply.sender, *address))
        if not question.reply.done():
            question.reply.set_result(reply)

    def _on_request(self, request: Request, address: Address) -> None:
        now = self._clock()
        answer = self._answers.get(request.method)
        if answer is None or not self._limit.allows(address, now):
            return
        token = self._token(address)
        proven = request.token == token
        if proven:
            self.liveness.asked(address, now)
            self._greet(Contact(request.sender, *address))
        result = None
        if proven or request.method == "ping":
            try:
                result = answer(address, request.arguments)
            except (RecordError, _MalformedRequestError):
                return
        self.transport.sendto(encode_reply(request.nonce, self._id, token, result), address)

    def _answer_ping(self, _address: Address, _arguments: list[object]) -> object:
        return True

    def _answer_find_node(self, address: Address, arguments: list[object]) -> object:
        match arguments:
            case [bytes(target)] if len(target) == ID_BYTES:
                nearest = self.router.nearest(target, K + 1)
                return [pack_contact(contact) for contact in nearest if contact.address != address][:K]
        raise _MalformedRequestError

    def _answer_rput(self, address: Address, arguments: list[object]) -> object:
        match arguments:
            case [bytes(key), int(life_ms), bytes(raw)]:
                return self._records.accept(key, raw, life_ms / 1000, source=address[0], now=self._clock())
        raise _MalformedRequestError

    def _answer_rget(self, _address: Address, arguments: list[object]) -> object:
        match arguments:
            case [bytes(key), int(since)]:
                page = self._records.page(key, since, PAGE_BYTES, self._clock())
                items = [[int(life * 1000), record.raw] for life, record in page.items]
                return [page.cursor, page.more, items]
        raise _MalformedRequestError

    # Whom we know

    def _admit(self, contact: Contact) -> None:
        """Take a node that has just answered into the table; an id moves once its old address is silent."""
        known = self.router.get(contact.id)
        if contact.id == self._id or known == contact or (known is not None and self._usable(known)):
            return
        if self.router.add_contact(contact):
            self._on_contact(contact)

    def _greet(self, contact: Contact) -> None:
        """Ping a node that asks us and is not in the table: it gets there if it answers."""
        if contact.id == self._id or self.router.holds(contact):
            return
        if contact.address in self._greetings or len(self._greetings) >= _MAX_GREETINGS:
            return
        task = asyncio.create_task(self._meet(contact, self.router.get(contact.id)))
        self._greetings[contact.address] = task
        task.add_done_callback(lambda _: self._greetings.pop(contact.address))

    async def _meet(self, contact: Contact, known: Contact | None) -> None:
        # An id that turns up elsewhere has moved only if it is gone from where it was.
        if known is None or await self.ping(known.address) is None:
            await self.ping(contact.address)

    def _miss(self, address: Address) -> None:
        self.liveness.missed(address, self._clock())
        if self.liveness.forgettable(address):
            for contact in list(self.router):
                if contact.address == address:
                    self.router.remove_contact(contact)

    def _usable(self, contact: Contact) -> bool:
        return not self.liveness.silent(contact.address, self._clock())

    # The socket

    def _token(self, address: Address) -> bytes:
        proof = f"{address[0]} {address[1]}".encode()
        return hashlib.blake2b(proof, key=self._secret, digest_size=TOKEN_BYTES).digest()

    async def close(self) -> None:
        """Close the socket, answer every open question with None, and end what runs here."""
        greetings = list(self._greetings.values())
        for greeting in greetings:
            greeting.cancel()
        await asyncio.gather(*greetings, return_exceptions=True)
        for question in list(self._questions.values()):
            if question.forget is not None:
                question.forget.cancel()
            elif not question.reply.done():
                question.reply.set_result(None)
        self.transport.abort()
        await self.lost.wait()


class _MalformedRequestError(Exception):
    """The arguments are not what the method takes."""
