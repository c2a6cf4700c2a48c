"""What a node answers. Everything that a stranger asks is checked for type and size. Sans-IO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from p2pllm.dht.contacts import ID_BYTES, Address, network_of, pack_contacts
from p2pllm.dht.exchange import MalformedRequestError
from p2pllm.dht.limits import RateLimit
from p2pllm.dht.pages import (
    DIGEST_BYTES,
    SLOT_BYTES,
    Digest,
    item_size,
    pack_digests,
    pack_records,
    parse_slots,
)
from p2pllm.dht.proof import prove
from p2pllm.dht.storage import Held, Records
from p2pllm.dht.table import ContactTable
from p2pllm.dht.wire import Request
from p2pllm.identity import Identity

__all__ = ["MAX_PICKED", "Answers", "K"]

K: Final = 20
"""Contacts in a bucket, and the most that an answer to find_node names."""

MAX_PICKED: Final = 32
"""Records that one question may name."""

PAGE_BYTES: Final = 1150
PROOFS_PER_S: Final = 200.0


class Answers:
    """The answers of the node with this ``identity``, from its ``records`` and its ``table``."""

    def __init__(
        self, identity: Identity, records: Records, table: ContactTable, clock: Callable[[], float]
    ) -> None:
        self._identity = identity
        self._records = records
        self._table = table
        self._clock = clock
        self._unproven_proofs = RateLimit(PROOFS_PER_S)
        self._methods: dict[str, Callable[[Address, list[object]], object]] = {
            "find_node": self._find_node,
            "rput": self._rput,
            "rget": self._rget,
            "digest": self._digest,
            "pick": self._pick,
        }

    def to(self, request: Request, address: Address, *, proven: bool) -> object:
        """The result for a request from ``address``; None if the sender has to come back with a token.

        ``proven`` says that it had one. Raises MalformedRequestError for an unknown method or what it does
        not take, RecordError for a record that nobody should have.
        """
        if request.method == "ping":
            return True
        if request.method == "hello":
            # A signature costs more than anything else that the unproven can ask for: not without end.
            if proven or self._unproven_proofs.allows("all of them", self._clock()):
                return prove(self._identity, request.nonce, request.sender)
            return None
        method = self._methods.get(request.method)
        if method is None:
            raise MalformedRequestError
        return method(address, request.arguments) if proven else None

    def _find_node(self, address: Address, arguments: list[object]) -> object:
        match arguments:
            case [bytes(target), int(count)] if len(target) == ID_BYTES and 1 <= count <= K:
                nearest = self._table.nearest(target, count + 1)
                return pack_contacts([contact for contact in nearest if contact.address != address][:count])
        raise MalformedRequestError

    def _rput(self, address: Address, arguments: list[object]) -> object:
        match arguments:
            case [bytes(key), int(life_ms), bytes(raw)]:
                source, now = network_of(address[0]), self._clock()
                return self._records.accept(key, raw, life_ms / 1000, source=source, now=now)
        raise MalformedRequestError

    def _rget(self, _address: Address, arguments: list[object]) -> object:
        match arguments:
            case [bytes(key), int(since)]:
                page = self._records.page(key, since, PAGE_BYTES, self._clock())
                return [page.cursor, page.more, pack_records(page.items)]
        raise MalformedRequestError

    def _digest(self, _address: Address, arguments: list[object]) -> object:
        match arguments:
            case [bytes(key), int(since)]:
                page = self._records.page(key, since, PAGE_BYTES, self._clock(), item_bytes=DIGEST_BYTES)
                return [page.cursor, page.more, pack_digests(map(Digest.of, page.items))]
        raise MalformedRequestError

    def _pick(self, _address: Address, arguments: list[object]) -> object:
        match arguments:
            case [bytes(key), bytes(packed)] if len(packed) <= MAX_PICKED * SLOT_BYTES:
                items: list[Held] = []
                room = PAGE_BYTES
                for held in self._records.pick(key, parse_slots(packed), self._clock()):
                    room -= item_size(held.record)
                    if room < 0:
                        break
                    items.append(held)
                return pack_records(items)
        raise MalformedRequestError
