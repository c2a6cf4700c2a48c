"""Which requests an entry takes in, and when each of them may start. Pure.

They wait in a fair queue. The first may start when fewer run than the measured limit allows, and when the
view promises a chain with KV cache for it that is not crowded by others. Beside those there is some room for
clients of whom nothing runs, so that they need not wait for those who have all the places, and may have more
of them than a limit that has come down since would allow. What was started and met no KV cache after all
comes back, before those that came later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from p2pllm.errors import BusyError, NoRouteError, P2PLLMError
from p2pllm.serving.front.concurrency import STRETCH, ConcurrencyLimit
from p2pllm.serving.front.fair_queue import MAX_CLIENTS, FairQueue, Ticket
from p2pllm.serving.front.keys import Client

__all__ = ["Admission", "Outlook"]

NEWCOMERS: Final = 0.25
"""Places for clients of whom nothing runs, as a part of the limit; one at least."""

CROWDED: Final = 2.0
"""No second request from here goes to a chain where a token waits so many times as long as it is worked on.
"""

LOOK_AGAIN_S: Final = 0.1
MAX_LOOK_AGAIN_S: Final = 0.8
"""How soon to try again where there was no chain or no KV cache; twice as long each time, up to this."""

FIRST_SERVICE_S: Final = 1.0
"""What a request takes, as long as none has ended."""

RECENT: Final = 16
"""How many requests the mean of what they take goes back."""

MAX_RETRY_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the view says of a request that would start now.

    ``missing`` are layers that nobody serves; ``has_room``: all stages of some chain have KV blocks for it.
    Of the best such chain ``work_s`` is what a token takes there, and ``wait_s`` how long it waits beside
    that.
    """

    missing: tuple[tuple[int, int], ...] = ()
    has_room: bool = True
    work_s: float = 0.0
    wait_s: float = 0.0

    def refuses(self, running: int) -> bool:
        """Whether a request should rather wait, while so many of this entry run."""
        is_crowded = running > 0 and self.wait_s > CROWDED * self.work_s
        return bool(self.missing) or not self.has_room or is_crowded


class Admission:
    """Who waits and who runs. Times are seconds of one clock."""

    def __init__(self, stretch: float = STRETCH) -> None:
        """``stretch`` is that of the `ConcurrencyLimit`."""
        self.limit = ConcurrencyLimit(stretch)
        self.refused: Counter[str] = Counter()
        """Requests that got no chain, by reason."""
        self.started = 0
        self.waited_s = 0.0
        """Of all that were started, in all."""
        self.look_at = 0.0
        """There is nothing to start before."""
        self._queue = FairQueue()
        self._beside: list[Ticket] = []
        """Those that were started in the room for newcomers and have no place of the others yet."""
        self._pause_s = LOOK_AGAIN_S
        self._missing: tuple[tuple[int, int], ...] = ()
        self._service_s = FIRST_SERVICE_S
        self._ended = 0
        self._promised: dict[str, float] = {}

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return self._queue.waiting

    @property
    def running(self) -> int:
        """How many requests have started and are not over."""
        return self._queue.running

    def oldest_s(self, now: float) -> float:
        """How long the one has waited that has waited longest (s); 0 if none does."""
        since = self._queue.oldest()
        return 0.0 if since is None else now - since

    def enter(self, ticket: Ticket, now: float) -> tuple[Ticket, BusyError] | None:
        """Let a request wait. If it makes one too many, who has to go, which may be itself, and what to tell
        it.
        """
        out = self._queue.add(ticket)
        if out is None:
            return None
        self.refused["queue_full"] += 1
        return out, BusyError(
            f"too many requests of {out.client.name} are waiting here already",
            retry_after_s=self._promise(out.client, now),
        )

    def next(self, now: float, outlook: Callable[[Ticket], Outlook]) -> Ticket | None:
        """Start the request that is next, if it may; ask again until none may."""
        if now < self.look_at:
            return None
        limit, running = self.limit.value, self._queue.running
        while self._beside and running - len(self._beside) < limit:
            self._beside.pop(0)
        is_full = running >= limit
        if is_full and len(self._beside) >= max(1, int(NEWCOMERS * limit)):
            return None
        ticket = self._queue.first(newcomers=is_full)
        if ticket is None:
            return None
        seen = outlook(ticket)
        self._missing = seen.missing
        if seen.refuses(running):
            self._pause(now)
            return None
        self._queue.start(ticket)
        if is_full:
            self._beside.append(ticket)
        return ticket

    def began(self, waited_s: float) -> None:
        """A request that was started, after so long a wait, has its first token."""
        self._pause_s = LOOK_AGAIN_S
        self.started += 1
        self.waited_s += waited_s

    def put_back(self, ticket: Ticket, error: P2PLLMError, now: float) -> None:
        """A request that was started got no chain, for this reason: it waits on, and all others with it."""
        self._queue.put_back(ticket)
        self._stop(ticket)
        self._missing = error.missing if isinstance(error, NoRouteError) else ()
        self._pause(now)

    def give_up(self, ticket: Ticket, now: float) -> P2PLLMError:
        """What to tell a request that has waited for too long, and still must ``drop`` out."""
        if self._missing:
            self.refused["no_route"] += 1
            return NoRouteError(self._missing)
        self.refused["queue_timeout"] += 1
        return BusyError(
            f"no room for this request in {now - ticket.since:.0f} s: try again later",
            retry_after_s=self._promise(ticket.client, now),
        )

    def drop(self, ticket: Ticket) -> None:
        """A request that waits is not wanted any more."""
        self._queue.drop(ticket)

    def end(self, ticket: Ticket, cost: float, service_s: float, now: float) -> None:
        """A request that was started is over: it took so much work, and so much time."""
        self._queue.end(ticket, cost)
        self._stop(ticket)
        self.look_at = now  # its KV cache is free
        self._ended += 1
        self._service_s += (service_s - self._service_s) / min(self._ended, RECENT)

    def each_s(self) -> float:
        """Time between two ends of requests, at the present pace (s)."""
        return self._service_s / max(1, self._queue.running)

    def _stop(self, ticket: Ticket) -> None:
        """It runs no more."""
        if ticket in self._beside:
            self._beside.remove(ticket)

    def _pause(self, now: float) -> None:
        """Start nothing for a while."""
        self.look_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_LOOK_AGAIN_S)

    def _promise(self, client: Client, now: float) -> float:
        """When there will be a place for a client's next request (s from now), a later one each time."""
        begins = max(now, self._promised.pop(client.name, now))
        at = min(begins + self.each_s() / self._queue.share(client), now + MAX_RETRY_S)
        self._promised[client.name] = at
        if len(self._promised) > MAX_CLIENTS:
            del self._promised[next(iter(self._promised))]
        return at - now
