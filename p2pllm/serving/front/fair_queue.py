"""Whose request is next: a weighted fair queue over clients. Pure, and in virtual time.

Start-time fair queueing (Goyal, Vin, Cheng 1996) for a server that does several things at once (Jin, Chase,
Kaur 2004): each request gets a start tag, the later of the virtual time at which it came and of the end of
its client's request before, and the smallest tag is next. A request ends its cost ÷ weight after its start;
the cost is guessed before, and put right afterwards, so that nobody gains by asking for little and taking
much.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Final

from p2pllm.serving.front.keys import Client

__all__ = ["MAX_CLIENTS", "MOST_OF_ONE", "MOST_WAITING", "FairQueue", "Ticket"]

MOST_WAITING: Final = 256
"""Requests that wait at most."""

MOST_OF_ONE: Final = 128
"""Of one client."""

MAX_CLIENTS: Final = 4096
"""Clients remembered at most, beside those who wait or are served."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One request. ``cost`` is its work in tokens as far as one can tell, ``since`` when it came (s)."""

    client: Client
    cost: float
    since: float
    came: float = 0.0
    """Virtual time at which it came."""
    charged: float = 0.0
    """What its client has been charged for it: virtual time."""


@dataclass(slots=True)
class _Flow:
    """One client's requests, oldest first."""

    weight: float
    waiting: deque[Ticket] = field(default_factory=deque)
    running: int = 0
    end: float = 0.0
    """Virtual time at which what it has begun ends."""

    @property
    def tag(self) -> float:
        """The start tag of its oldest waiting request."""
        return max(self.waiting[0].came, self.end)


class FairQueue:
    """All requests that wait or run, by client. A request that is in it must leave by ``drop`` or ``end``."""

    def __init__(self) -> None:
        self.waiting = 0
        self.running = 0
        self._flows: OrderedDict[str, _Flow] = OrderedDict()
        self._time = 0.0

    def add(self, ticket: Ticket) -> Ticket | None:
        """Let a request wait. Where that is one too many, the newest of the client with the most in the queue
        for its weight gives way, which may be this one: returned, and not in the queue any more.
        """
        name = ticket.client.name
        own = self._flows.setdefault(name, _Flow(ticket.client.weight))
        self._flows.move_to_end(name)
        own.weight = ticket.client.weight
        ticket.came = self._time
        own.waiting.append(ticket)
        self.waiting += 1
        if len(own.waiting) > MOST_OF_ONE:
            greediest = own
        elif self.waiting > MOST_WAITING:
            greediest = max(
                self._flows.values(), key=lambda flow: (len(flow.waiting) / flow.weight, flow is own)
            )
        else:
            return None
        out = greediest.waiting[-1]
        self.drop(out)
        return out

    def first(self, *, newcomers: bool = False) -> Ticket | None:
        """The request that is next; with ``newcomers`` only of clients of whom nothing runs, while of another
        one several do.
        """
        flows = self._flows.values()
        if newcomers and all(flow.running < 2 for flow in flows):
            return None
        ready = [flow for flow in flows if flow.waiting and not (newcomers and flow.running)]
        best = min(ready, key=lambda flow: (flow.tag, flow.waiting[0].since), default=None)
        return None if best is None else best.waiting[0]

    def oldest(self) -> float | None:
        """Since when the one that has waited longest waits (s)."""
        return min((flow.waiting[0].since for flow in self._flows.values() if flow.waiting), default=None)

    def share(self, client: Client) -> float:
        """Which part of what is served a client gets while everyone who waits goes on waiting."""
        others = sum(
            flow.weight for name, flow in self._flows.items() if flow.waiting and name != client.name
        )
        return client.weight / (client.weight + others)

    def start(self, ticket: Ticket) -> None:
        """Serve a request, which was ``first``."""
        flow = self._flows[ticket.client.name]
        tag = flow.tag
        flow.waiting.popleft()
        flow.running += 1
        ticket.charged = ticket.cost / flow.weight
        flow.end = tag + ticket.charged
        self._time = max(self._time, tag)
        self.waiting -= 1
        self.running += 1

    def put_back(self, ticket: Ticket) -> None:
        """A request that was started could not be served: it is before all that came later."""
        flow = self._flows[ticket.client.name]
        flow.running -= 1
        flow.end -= ticket.charged
        flow.waiting = deque(sorted((ticket, *flow.waiting), key=lambda other: other.since))
        self.waiting += 1
        self.running -= 1

    def drop(self, ticket: Ticket) -> None:
        """A request that waits is not wanted any more."""
        self._flows[ticket.client.name].waiting.remove(ticket)
        self.waiting -= 1
        self._forget(ticket.client.name)

    def end(self, ticket: Ticket, cost: float) -> None:
        """A request that was started is over; ``cost`` is what it really was."""
        flow = self._flows[ticket.client.name]
        flow.running -= 1
        flow.end += cost / flow.weight - ticket.charged
        self.running -= 1
        self._forget(ticket.client.name)

    def _forget(self, name: str) -> None:
        """Forget clients who are even with all others, or have been away for longest."""
        if not self.waiting and not self.running:
            self._flows.clear()  # nobody waited for what they took
            return
        flow = self._flows[name]
        if not flow.waiting and not flow.running and flow.end <= self._time:
            del self._flows[name]
        if len(self._flows) > MAX_CLIENTS + self.waiting + self.running:
            idle = (name for name, flow in self._flows.items() if not flow.waiting and not flow.running)
            del self._flows[next(idle)]
