"""Finding the nodes nearest to a key.

`Lookup` is the search as a pure state machine: whom to ask next, what an answer changes, what the result
is. `find_nearest` drives it without a barrier: each answer at once frees its place for the next question,
so one slow or dead node delays nobody.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from typing import Final

from p2pllm.dht.table import distance, nearest
from p2pllm.dht.wire import Address, Contact

__all__ = ["Answer", "Lookup", "Replicas", "find_nearest"]

PARALLEL: Final = 4
MAX_ASKED: Final = 64
DEADLINE_S: Final = 1.5
REMEMBER_S: Final = 20.0

_MAX_KNOWN = 256
_MAX_DUDS = 3
_MAX_KEYS = 256

Answer = tuple[Contact, list[Contact]]
"""Who really answered at the address that was asked, and the contacts it named."""


class Lookup:
    """A search for the ``count`` nodes nearest to ``target`` (20 bytes), from the contacts of ``start``.

    An address is asked once, whoever is said to live there. What a node says is believed until three of the
    contacts it named did not answer: made-up contacts next to the target must not use up the search.
    """

    def __init__(self, target: bytes, count: int, start: Iterable[Contact]) -> None:
        self._target = target
        self._count = count
        self._waiting: list[tuple[tuple[int, bytes], Contact]] = []
        self._named_by: dict[Address, set[bytes]] = {}
        self._duds: Counter[bytes] = Counter()
        self._asked = 0
        self._answered: dict[bytes, Contact] = {}
        self._learn(start, b"")

    def next(self) -> Contact | None:
        """The nearest contact not asked yet, or None if asking on cannot improve the result."""
        result = self.result()
        while self._waiting and self._asked < MAX_ASKED:
            if len(result) == self._count and self._waiting[0][0] > distance(result[-1], self._target):
                break
            contact = heapq.heappop(self._waiting)[1]
            if any(self._duds[namer] < _MAX_DUDS for namer in self._named_by[contact.address]):
                self._asked += 1
                return contact
        return None

    def answered(self, answer: Answer) -> None:
        """Take in an answer."""
        contact, named = answer
        self._answered[contact.id] = contact
        self._learn(named, contact.id)

    def failed(self, contact: Contact) -> None:
        """A contact that ``next`` gave out did not answer."""
        self._duds.update(self._named_by[contact.address])
        self._duds[b""] = 0  # our own table may well be out of date

    def result(self) -> list[Contact]:
        """The nearest contacts that have answered, nearest first."""
        return nearest(self._answered.values(), self._target, self._count)

    def _learn(self, contacts: Iterable[Contact], namer: bytes) -> None:
        for contact in contacts:
            if contact.address in self._named_by:
                self._named_by[contact.address].add(namer)
            elif len(self._named_by) < _MAX_KNOWN:
                self._named_by[contact.address] = {namer}
                heapq.heappush(self._waiting, (distance(contact, self._target), contact))


async def find_nearest(
    lookup: Lookup, ask: Callable[[Contact], Coroutine[object, object, Answer | None]]
) -> list[Contact]:
    """Run a lookup to its end, or for at most 1.5 s. ``ask`` returns None for no answer."""
    running: dict[asyncio.Task[Answer | None], Contact] = {}
    try:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                while len(running) < PARALLEL and (contact := lookup.next()) is not None:
                    running[asyncio.create_task(ask(contact))] = contact
                if not running:
                    break
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    contact = running.pop(task)
                    if (answer := task.result()) is None:
                        lookup.failed(contact)
                    else:
                        lookup.answered(answer)
    except TimeoutError:
        pass  # what has answered by now is good enough
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return lookup.result()


class Replicas:
    """The nodes that lookups found nearest to each key, remembered for 20 s: at most ``count`` for a key."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._found: dict[bytes, tuple[float, list[Contact]]] = {}

    def get(self, key: bytes, now: float) -> list[Contact] | None:
        """The nodes found for a key, nearest first, or None if a lookup is due."""
        expires, contacts = self._found.get(key, (now, []))
        return contacts if now < expires else None

    def found(self, key: bytes, contacts: list[Contact], now: float) -> None:
        """Remember the result of a lookup."""
        self._found.pop(key, None)
        self._found[key] = now + REMEMBER_S, contacts
        if len(self._found) > _MAX_KEYS:
            del self._found[next(iter(self._found))]

    def forget(self, key: bytes) -> None:
        """One of the nodes failed: look again."""
        self._found.pop(key, None)

    def arrived(self, contact: Contact) -> None:
        """A node was added to the table: it takes its place among the nearest."""
        for key, (expires, contacts) in self._found.items():
            others = [other for other in contacts if other.id != contact.id]
            self._found[key] = expires, nearest([*others, contact], key, self._count)
