"""What a node asks of others, and who gets into its table.

Nobody is asked for anything, nor counts for anything, before he has proved his id (`hello`). What others
reply is checked here for type and size, and is typed from then on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Final
from weakref import WeakValueDictionary

from kademlia.node import Node

from p2pllm.dht.answers import Answers, K
from p2pllm.dht.contacts import Address, Contact, parse_contacts
from p2pllm.dht.exchange import Exchange, Wrap
from p2pllm.dht.limits import RateLimit
from p2pllm.dht.lookup import Answer
from p2pllm.dht.pages import Digest, Part, Slot, pack_slots, parse_digests, parse_records
from p2pllm.dht.proof import PADDING, is_proven
from p2pllm.dht.storage import Records
from p2pllm.dht.table import ContactTable
from p2pllm.dht.wire import Reply, Request
from p2pllm.identity import Identity

__all__ = ["RegistryProtocol"]

FRESH_S: Final = 5.0
FOLLOWS_PER_S: Final = 0.5

_MAX_GREETINGS = 256


class RegistryProtocol(Exchange):
    """The datagram protocol of one address family of a DhtNode. ``on_contact`` hears of who enters the
    table.
    """

    def __init__(
        self,
        identity: Identity,
        storage: Records,
        *,
        clock: Callable[[], float],
        on_contact: Callable[[Contact], None],
        wrap: Wrap | None = None,
    ) -> None:
        source_node = Node(identity.node_id)
        super().__init__(source_node, storage, K, clock=clock, wrap=wrap)
        self.router = ContactTable(self, K, source_node, self.is_usable)
        self._answers = Answers(identity, storage, self.router, clock)
        self._on_contact = on_contact
        self._meeting = WeakValueDictionary[Address, asyncio.Lock]()
        self._follows = RateLimit(FOLLOWS_PER_S)
        self._greetings: dict[Address, asyncio.Task[None]] = {}

    # Asking

    async def ping(self, address: Address) -> bool:
        """Whether anybody answers at ``address``. Asks even an address that was silent a moment ago."""
        return await self.ask(address, "ping") is not None

    async def hello(self, address: Address) -> Contact | None:
        """Who proves to be at ``address``, or None. Asks even an address that was silent a moment ago."""
        reply = await self.ask(address, "hello", PADDING)
        if reply is not None and reply.result is None:
            # The replier has many to answer just now, and serves first who has shown to be there.
            reply = await self.ask(address, "hello", PADDING)
        if reply is None or not is_proven(reply.result, reply.nonce, self._id, reply.sender):
            return None
        contact = Contact(reply.sender, *address)
        self.liveness.proved(address, contact.id)
        self._admit(contact)
        return contact

    async def find_node(self, contact: Contact, target: bytes, count: int) -> Answer | None:
        """Who answers at the contact's address, and at most ``count`` contacts it knows nearest to
        ``target``; None for no answer, or if whoever answers is known to be elsewhere.
        """
        reply = await self._ask(contact.address, "find_node", target, count)
        if reply is None or not isinstance(reply.result, bytes):
            return None
        real = Contact(reply.sender, *contact.address)
        if self._at(real) != real:
            return None
        named = parse_contacts(reply.result, named_by=contact.host)[:count]
        return real, [one for one in map(self._at, named) if one.id != self._id and self.is_usable(one)]

    async def store(self, contact: Contact, key: bytes, raw: bytes, life: float) -> bool | None:
        """Whether the contact holds the record now, None for no answer; ``life`` is what it has left (s)."""
        reply = await self._ask(contact.address, "rput", key, round(life * 1000), raw, expected=contact.id)
        return None if reply is None else reply.result is True

    async def fetch(self, contact: Contact, key: bytes, since: int) -> Part[tuple[bytes, float]] | None:
        """Raw records and remaining lives (s) that the contact has under ``key`` and took up after version
        ``since``; None for no answer.
        """
        reply = await self._ask(contact.address, "rget", key, since, expected=contact.id)
        match reply and reply.result:
            case [int(version), bool(more), [*packed]] if reply and version >= since:
                return Part(reply.token, version, more, parse_records(packed))
        return None

    async def digests(self, contact: Contact, key: bytes, since: int) -> Part[Digest] | None:
        """Digests of what ``fetch`` would give; None for no answer."""
        reply = await self._ask(contact.address, "digest", key, since, expected=contact.id)
        match reply and reply.result:
            case [int(version), bool(more), bytes(packed)] if reply and version >= since:
                return Part(reply.token, version, more, parse_digests(packed))
        return None

    async def pick(
        self, contact: Contact, key: bytes, slots: Sequence[Slot]
    ) -> list[tuple[bytes, float]] | None:
        """The records named (at most MAX_PICKED), as many as the contact has and one answer holds, with their
        remaining lives (s); None for no answer.
        """
        reply = await self._ask(contact.address, "pick", key, pack_slots(slots), expected=contact.id)
        match reply and reply.result:
            case [*packed]:
                return parse_records(packed)
        return None

    async def _ask(
        self, address: Address, method: str, *arguments: object, expected: bytes | None = None
    ) -> Reply | None:
        """A reply from whoever has proved its id at ``address``, the ``expected`` one if that is given."""
        if self.liveness.silent(address, self._clock()):
            return None
        if await self._resident(address) is None:
            return None
        reply = await self.ask(address, method, *arguments)
        if reply is not None and reply.result is None:
            # Our token was missing or stale; the reply brought a good one.
            reply = await self.ask(address, method, *arguments)
        if reply is not None and reply.sender != self.liveness.proven(address):
            successor = await self.hello(address)
            if successor is None or successor.id != reply.sender:
                return None
        return reply if reply is None or expected in (None, reply.sender) else None

    async def _resident(self, address: Address) -> bytes | None:
        """The id that is proven for ``address``, by a hello if there is none yet; one for all who wait."""
        if self.liveness.proven(address) is None:
            async with self._meeting.setdefault(address, asyncio.Lock()):
                now = self._clock()
                if self.liveness.proven(address) is None and not self.liveness.silent(address, now):
                    await self.hello(address)
        return self.liveness.proven(address)

    def _answer(self, request: Request, address: Address, *, proven: bool) -> object:
        return self._answers.to(request, address, proven=proven)

    # Whom we know

    def is_usable(self, contact: Contact) -> bool:
        """Whether the contact may be asked and named right now."""
        return not self.liveness.silent(contact.address, self._clock())

    def is_fresh(self, contact: Contact) -> bool:
        """Whether the contact has proved to be where it is, and answered there within the last seconds."""
        memory, now = self.liveness, self._clock()
        return (
            memory.proven(contact.address) == contact.id
            and memory.heard(contact.address) > now - FRESH_S
            and self._at(contact) == contact
        )

    def moved(self, node_id: bytes, addresses: Iterable[Address]) -> None:
        """The owner of ``node_id`` says that it is at one of these addresses now, all of this family.

        If we know it elsewhere, or know hardly anybody, we go and see; not after each of many records, which
        could send us anywhere.
        """
        known = self.router.get(node_id)
        addresses = list(addresses)
        if node_id == self._id or (known.address in addresses if known else len(self.router) >= K):
            return
        if not self._follows.allows(node_id, self._clock()):
            return
        for address in addresses:
            self._start(address, self._follow(Contact(node_id, *address)))

    def _at(self, contact: Contact) -> Contact:
        """The contact where we know it, as long as it answers there."""
        known = self.router.get(contact.id)
        return known if known is not None and self.is_usable(known) else contact

    def _heard(self, sender: bytes, address: Address, *, asks: bool) -> None:
        contact = Contact(sender, *address)
        if sender == self._id or self.router.holds(contact):
            return
        if self.liveness.proven(address) == sender and self._at(contact) == contact:
            self._admit(contact)
        elif asks and self.router.has_room(sender) and self.liveness.may_greet(address, self._clock()):
            self._start(address, self._greet(contact))

    def _missed(self, address: Address) -> None:
        if self.liveness.forgettable(address):
            for contact in list(self.router):
                if contact.address == address:
                    self.router.remove_contact(contact)

    def _admit(self, contact: Contact) -> None:
        """Take a node that has proved to be there into the table, unless it still answers elsewhere."""
        if contact.id == self._id or self._at(contact) != contact or self.router.get(contact.id) == contact:
            return
        self.router.add_contact(contact)
        self._on_contact(contact)

    async def _greet(self, contact: Contact) -> None:
        """Meet a node that asks us: it gets into the table if it proves its id, and is not known
        elsewhere.
        """
        known = self.router.get(contact.id)
        met = await self._resident(contact.address)
        if met != contact.id or known is None or known.address == contact.address:
            return
        elsewhere = await self.hello(known.address)
        if elsewhere is None or elsewhere.id != contact.id:
            self._replace(known, contact)

    async def _follow(self, contact: Contact) -> None:
        """Move a contact to where its owner says it is, if it proves to be there."""
        known = self.router.get(contact.id)
        met = await self.hello(contact.address)
        if met == contact and known is not None and known == self.router.get(contact.id):
            self._replace(known, contact)

    def _replace(self, known: Contact, contact: Contact) -> None:
        self.router.remove_contact(known)
        self._admit(contact)

    def _start(self, address: Address, greeting: Coroutine[object, object, None]) -> None:
        if address in self._greetings or len(self._greetings) >= _MAX_GREETINGS:
            greeting.close()
            return
        task = asyncio.create_task(greeting)
        self._greetings[address] = task
        task.add_done_callback(lambda _: self._greetings.pop(address))

    def stop(self) -> None:
        """Close the socket, answer every open question with None, and have what runs here end."""
        for greeting in self._greetings.values():
            greeting.cancel()
        super().stop()

    async def close(self) -> None:
        """Stop, and wait until nothing is left."""
        await super().close()
        await asyncio.gather(*self._greetings.values(), return_exceptions=True)
