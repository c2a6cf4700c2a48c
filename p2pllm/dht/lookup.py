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

from p2pllm.dht.contacts import Address, Contact
from p2pllm.dht.table import by_distance, distance

__all__ = ["PATIENCE_S", "Answer", "Lookup", "Replicas", "find_nearest"]

PARALLEL: Final = 4
MAX_ASKED: Final = 64
ALWAYS_ASKED: Final = 3
DEADLINE_S: Final = 1.5
PATIENCE_S: Final = 1.0

_MAX_KNOWN = 256
_MAX_DUDS = 3
_MAX_KEYS = 2048

Answer = tuple[Contact, list[Contact]]
"""Who really answered at the address that was asked, and the contacts it named."""


class Lookup:
    """A search for the ``count`` nodes nearest to ``target`` (20 bytes), from the contacts of ``start``.

    An address is asked once, whoever is said to live there, and as soon as the nearest of them is due:
    whoever names it under a far id must not hide it. What a node says is believed until three of the contacts
    it named did not answer: made-up contacts next to the target must not use up the search. A contact that
    ``is_fresh`` has answered just now: it counts, and is asked only if it is one of the three nearest, who
    know the neighbourhood best.
    """

    def __init__(
        self,
        target: bytes,
        count: int,
        start: Iterable[Contact],
        is_fresh: Callable[[Contact], bool] = lambda _: False,
    ) -> None:
        self._target = target
        self._count = count
        self._is_fresh = is_fresh
        self._spared: list[Contact] = []
        self._waiting: list[tuple[tuple[int, bytes], Contact]] = []
        self._named_by: dict[Contact, set[bytes]] = {}
        self._duds: Counter[bytes] = Counter()
        self._asked: set[Address] = set()
        self._answered: dict[bytes, Contact] = {}
        self._result: list[Contact] = []
        self._learn(start, b"")

    def next(self) -> Contact | None:
        """The nearest contact not asked yet, or None if asking on cannot improve the result."""
        result = self._result
        while self._waiting and len(self._asked) < MAX_ASKED:
            if len(result) == self._count and self._waiting[0][0] > distance(result[-1], self._target):
                break
            contact = heapq.heappop(self._waiting)[1]
            if contact in result[ALWAYS_ASKED:]:
                self._spared.append(contact)
            elif contact.address not in self._asked and self._is_credible(contact):
                self._asked.add(contact.address)
                return contact
        return None

    def answered(self, answer: Answer) -> None:
        """Take in an answer."""
        contact, named = answer
        self._answered[contact.id] = contact
        self._learn(named, contact.id)

    def failed(self, contact: Contact) -> None:
        """A contact that ``next`` gave out did not answer."""
        self._duds.update(self._named_by[contact])
        self._duds[b""] = 0  # our own table may well be out of date
        if self._answered.get(contact.id) == contact:
            del self._answered[contact.id]
            self._rank()
        for spared in self._spared:
            heapq.heappush(self._waiting, (distance(spared, self._target), spared))
        self._spared.clear()

    def result(self) -> list[Contact]:
        """The nearest contacts that have answered, nearest first."""
        return self._result

    def _is_credible(self, contact: Contact) -> bool:
        return any(self._duds[namer] < _MAX_DUDS for namer in self._named_by[contact])

    def _learn(self, contacts: Iterable[Contact], namer: bytes) -> None:
        for contact in contacts:
            if contact in self._named_by:
                self._named_by[contact].add(namer)
            elif len(self._named_by) < _MAX_KNOWN:
                self._named_by[contact] = {namer}
                heapq.heappush(self._waiting, (distance(contact, self._target), contact))
                if self._is_fresh(contact):
                    self._answered[contact.id] = contact
        self._rank()

    def _rank(self) -> None:
        self._result = by_distance(self._answered.values(), self._target)[: self._count]


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
    """The nodes that lookups found nearest to each key, at most ``count``.

    When some are gone a lookup is due a second later: in the confusion after many have died, looking up every
    key again for each of them would make it worse.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._found: dict[bytes, tuple[float, list[Contact]]] = {}

    def get(self, key: bytes, now: float) -> list[Contact] | None:
        """The nodes found for a key, nearest first, or None if a lookup is due."""
        due, contacts = self._found.get(key, (now, []))
        return contacts if now < due else None

    def found(self, key: bytes, contacts: list[Contact], now: float, good_for: float) -> None:
        """Remember the result of a lookup for so many seconds."""
        self._found.pop(key, None)
        self._found[key] = now + good_for, contacts
        if len(self._found) > _MAX_KEYS:
            del self._found[next(iter(self._found))]

    def failed(self, key: bytes, contact: Contact, now: float) -> None:
        """One of the nodes did not answer."""
        due, contacts = self._found.get(key, (now, []))
        left = [other for other in contacts if other != contact]
        if len(left) <= self._count // 2:
            self._found.pop(key, None)
        else:
            self._found[key] = min(due, now + PATIENCE_S), left

    def clear(self) -> None:
        """The network has changed much: look for everything again."""
        self._found.clear()

    def arrived(self, contact: Contact) -> None:
        """A node was added to the table: it takes its place among the nearest."""
        for key, (due, contacts) in self._found.items():
            others = [other for other in contacts if other.id != contact.id]
            self._found[key] = due, by_distance([*others, contact], key)[: self._count]
