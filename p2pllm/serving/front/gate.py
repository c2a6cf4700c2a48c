"""The asyncio side of admission: requests wait here for their turn, each with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Final

from p2pllm.errors import BusyError, NoRouteError, P2PLLMError
from p2pllm.serving.entry import Generated
from p2pllm.serving.front.admission import Admission, Outlook
from p2pllm.serving.front.concurrency import STRETCH
from p2pllm.serving.front.fair_queue import Ticket
from p2pllm.serving.front.keys import Client

__all__ = ["QUEUE_TIMEOUT_S", "Gate", "Place"]

QUEUE_TIMEOUT_S: Final = 60.0

TOKEN_COST: Final = 2.0
"""What a new token costs beside one of the prompt (as in Sheng et al. 2024, Fairness in Serving LLMs)."""

FIRST_ANSWER: Final = 128.0
"""Tokens of an answer as long as none has ended."""

RECENT: Final = 32
"""How many answers the mean of their lengths goes back."""


class Gate:
    """Admission of one entry. Needs no task of its own: whoever comes, goes, or gets a token moves it on."""

    def __init__(
        self,
        outlook: Callable[[int], Outlook],
        *,
        timeout_s: float = QUEUE_TIMEOUT_S,
        stretch: float = STRETCH,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``outlook`` says what the view promises to a request of so many prompt tokens; ``timeout_s`` is how
        long a request waits at most, ``stretch`` is that of the `ConcurrencyLimit`.
        """
        self.admission = Admission(stretch)
        self.timeout_s = timeout_s
        self.clock = clock
        self._outlook = outlook
        self._places: dict[Ticket, Place] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self._answer = FIRST_ANSWER

    @contextmanager
    def place(self, client: Client, prompt: int, most: int | None) -> Iterator[Place]:
        """A place in the queue for a request of about ``prompt`` tokens that wants ``most`` new ones; what it
        has is given back at the end of the block, whatever it was doing. Raises BusyError.
        """
        now = self.clock()
        answer = self._answer if most is None else min(most, self._answer)
        ticket = Ticket(client, prompt + TOKEN_COST * answer, since=now)
        place = Place(self, ticket, prompt)
        if (full := self.admission.enter(ticket, now)) is not None:
            out, error = full
            if out is ticket:
                raise error
            self._places.pop(out).refuse(error)
        self._places[ticket] = place
        try:
            self.move_on()
            yield place
        finally:
            self._places.pop(ticket, None)
            place.leave()
            self.move_on()

    def move_on(self) -> None:
        """Start whoever may start now, and see to it that this is done again in time."""
        now = self.clock()
        while ticket := self.admission.next(now, lambda ticket: self._outlook(self._places[ticket].prompt)):
            self._places[ticket].start(now)
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self.admission.waiting and (wait_s := self.admission.look_at - now) > 0:
            self._alarm = asyncio.get_running_loop().call_later(wait_s, self.move_on)

    def answered(self, tokens: int) -> None:
        """An answer of so many tokens has ended."""
        self._answer += (tokens - self._answer) / RECENT


class Place:
    """One request at the gate, from ``Gate.place``. ``prompt`` is how many tokens its prompt has."""

    def __init__(self, gate: Gate, ticket: Ticket, prompt: int) -> None:
        self.prompt = prompt
        self.tokens = 0
        """New tokens so far."""
        self.waited_s = 0.0
        """From when it came to when it was last started (s)."""
        self._gate = gate
        self._ticket = ticket
        self._deadline = gate.clock() + gate.timeout_s
        self._news = asyncio.Event()
        self._started_at: float | None = None
        self._last_at: float | None = None
        self._refusal: BusyError | None = None

    async def through(self, generate: Callable[[], AsyncGenerator[Generated]]) -> AsyncGenerator[Generated]:
        """Wait for its turn, then yield what ``generate`` does; called again, at a further turn, if there was
        no chain or no KV cache for it.

        Raises BusyError, or NoRouteError with the layers that nobody serves, when it has waited for too long;
        and what ``generate`` raises for other reasons, or later.
        """
        while True:
            await self._turn()
            try:
                async with aclosing(generate()) as stream:
                    async for generated in stream:
                        self._count()
                        yield generated
                return
            except (BusyError, NoRouteError) as error:
                if self.tokens:
                    raise
                self._put_back(error)

    def start(self, now: float) -> None:
        """Its turn has come."""
        self.waited_s = now - self._ticket.since
        self._started_at = now
        self._news.set()

    def refuse(self, error: BusyError) -> None:
        """It has lost its place in the queue to another client's request."""
        self._refusal = error
        self._news.set()

    def leave(self) -> None:
        """It is over, or was given up: nothing of it is left."""
        now, admission = self._gate.clock(), self._gate.admission
        if self._started_at is not None:
            cost = self.prompt + TOKEN_COST * self.tokens
            admission.end(self._ticket, cost, now - self._started_at, now)
            self._started_at = None
            if self.tokens:
                self._gate.answered(self.tokens)
        elif self._refusal is None:
            admission.drop(self._ticket)

    async def _turn(self) -> None:
        gate = self._gate
        try:
            async with asyncio.timeout(self._deadline - gate.clock()):
                await self._news.wait()
        except TimeoutError:
            if self._started_at is None:
                raise gate.admission.give_up(self._ticket, gate.clock()) from None
        if self._refusal is not None:
            raise self._refusal

    def _put_back(self, error: P2PLLMError) -> None:
        self._started_at = None
        self._news.clear()
        self._gate.admission.put_back(self._ticket, error, self._gate.clock())
        self._gate.move_on()

    def _count(self) -> None:
        """One more token has come."""
        gate = self._gate
        now, admission = gate.clock(), gate.admission
        self.tokens += 1
        if self._last_at is None:
            admission.began(self.waited_s)
        else:
            limit = admission.limit.value
            admission.limit.note(admission.running, now - self._last_at, now)
            if admission.limit.value > limit:
                gate.move_on()
        self._last_at = now
