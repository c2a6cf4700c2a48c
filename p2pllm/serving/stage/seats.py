"""All seats of a peer, found by what frames say. For the event loop's thread.

A session's id ends with its entry, so no entry can have seats that another one's frames find.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

from p2pllm.scheduling import PeerId
from p2pllm.serving.stage.seat import Seat

__all__ = ["Seats"]


class Seats:
    """The seats that are taken."""

    def __init__(self) -> None:
        self._of: dict[str, list[Seat]] = {}
        self.empty = asyncio.Event()
        """Set while none is taken."""
        self.empty.set()

    def __iter__(self) -> Iterator[Seat]:
        """All of them, as of now: they may be removed meanwhile."""
        return iter([seat for seats in self._of.values() for seat in seats])

    def __len__(self) -> int:
        """How many are taken."""
        return sum(map(len, self._of.values()))

    def add(self, seat: Seat) -> None:
        """One more is taken."""
        self._of.setdefault(seat.plan.session, []).append(seat)
        self.empty.clear()

    def remove(self, seat: Seat) -> None:
        """One is left."""
        seats = self._of[seat.plan.session]
        seats.remove(seat)
        if not seats:
            del self._of[seat.plan.session]
        if not self._of:
            self.empty.set()

    def at(self, session: str, stage: int, generation: int) -> Seat | None:
        """The one that frames of one chain of a session are for."""
        address = session, stage, generation
        return next((seat for seat in self._of.get(session, ()) if seat.address == address), None)

    def of(self, session: str, entry: PeerId) -> list[Seat]:
        """All of one session, if it is this entry's."""
        return [seat for seat in self._of.get(session, ()) if seat.entry == entry]

    def holding(self, session: str, start: int) -> Seat | None:
        """The one whose layers begin at ``start``."""
        return next((seat for seat in self._of.get(session, ()) if seat.key[1] == start), None)

    def waiting_bytes(self) -> int:
        """What hidden states take that wait for them."""
        return sum(seat.waiting_bytes for seat in self)

    def greediest(self) -> Seat:
        """The one with most waiting, of the entry with most: a flood costs whoever asked for it."""
        waiting = Counter[PeerId]()
        for seat in self:
            waiting[seat.entry] += seat.waiting_bytes
        return max(self, key=lambda seat: (waiting[seat.entry], seat.waiting_bytes))
