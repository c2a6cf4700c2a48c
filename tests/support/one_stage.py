"""One stage by itself, and the books on what it was asked to do: to whom may it send what, who moves it?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from p2pllm.errors import LinkError
from p2pllm.scheduling import PeerId
from p2pllm.serving.stage.seat import Seat
from p2pllm.serving.stage.stages import Stages
from p2pllm.transport import (
    Close,
    Failed,
    Hidden,
    Message,
    Open,
    Opened,
    Renew,
    Reroute,
    Token,
    Tokens,
)
from support.bounded import CONTEXT, HIDDEN, Bounded, Clock

__all__ = ["INBOX", "SEATS", "OneStage"]

SEATS, INBOX, WAITING_BYTES = 4, 4, 200


@dataclass(frozen=True)
class Part:
    """What an entry has asked the peer to do in one chain."""

    entry: PeerId
    message: Open | Reroute


class OneStage:
    """The stages of peer ``own``, with little room, on a loop of their own; close it at the end."""

    def __init__(self, own: PeerId) -> None:
        self._patches = [
            patch("p2pllm.serving.stage.stages.MAX_SEATS", SEATS),
            patch("p2pllm.serving.stage.stages.MAX_WAITING_BYTES", WAITING_BYTES),
            patch("p2pllm.serving.stage.seat._INBOX", INBOX),
        ]
        for each in self._patches:
            each.start()
        self._own = own
        self.loop = Clock()
        self.down: set[PeerId] = set()
        """Peers that cannot be reached."""

        self.executor = Bounded()
        self.stages = Stages(
            own=own,
            hidden=HIDDEN,
            executor=self.executor,  # type: ignore[arg-type]
            send=self._send,
            drain=self._reach,
            connect=self._reach,
            changed=lambda: None,
        )
        self._sent: list[tuple[PeerId, Message]] = []
        self._parts: list[Part] = []
        self._task = self.loop.create_task(self.stages.run())
        self.settle()

    @property
    def seats(self) -> list[Seat]:
        """Those that are taken."""
        return list(self.stages._seats)

    def settle(self, act: Callable[[], object] = lambda: None) -> None:
        """Do that on the loop, and wait for what comes of it."""

        async def turns() -> None:
            act()
            await asyncio.sleep(0)
            while self.loop._ready:  # type: ignore[attr-defined]
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())

    def deliver(self, sender: PeerId, message: Any, times: int = 1) -> None:
        """Hand a frame over; one from whoever has no say may have no effect but a refusal."""
        before, runs, sent = {seat: _state(seat) for seat in self.seats}, self.executor.runs, len(self._sent)
        may = self._has_say(sender, message)
        if may and isinstance(message, Open | Reroute):
            self._parts.append(Part(sender, message))
        self.settle(lambda: [self.stages.receive(sender, message) for _ in range(times)])
        after = {seat: _state(seat) for seat in self.seats}
        if not may:
            assert (after, self.executor.runs) == (before, runs)
            refusals = self._sent[sent:]
            assert len(refusals) <= isinstance(message, Open | Reroute)
            assert all(peer == sender and isinstance(it, Failed) for peer, it in refusals)
            del self._sent[sent:]
        elif not isinstance(message, Hidden):  # a flood costs whoever has asked for most
            others = (seat for seat in before if seat.plan.session != message.session)
            assert all(after.get(seat) == before[seat] for seat in others)
        for seat in before.keys() & after.keys():
            plan = before[seat][0]
            assert seat.plan is plan or seat.plan.generation > plan.generation

    def check(self) -> None:
        """Nothing went outside a chain, and nothing is held for nobody."""
        for peer, message in self._sent:
            assert peer in self._recipients(message), f"{message} to {peer[:1]}"
            assert not (isinstance(message, Failed) and "internal error" in message.reason)
        self._sent.clear()
        seats = self.seats
        assert sorted(self.executor.open) == sorted(seat.key for seat in seats)
        assert self.stages.sessions == len(seats) <= SEATS
        for seat in seats:
            peer, start, end = seat.plan.stages[seat.plan.stage]
            assert (peer, self.executor.spans[seat.key]) == (self._own, (start, end))
            assert seat.plan.session.endswith(seat.entry)
            waiting: Any = seat.inbox._queue  # type: ignore[attr-defined]
            assert seat.waiting_bytes == sum(len(it.data) for it in waiting if isinstance(it, Hidden))
        assert sum(seat.waiting_bytes for seat in seats) <= WAITING_BYTES
        assert not self._task.done()

    def stop(self) -> None:
        """What happens when the peer ends: all is freed, and nobody gets a seat any more."""
        self.settle(self._task.cancel)
        assert self._task.cancelled()
        assert (self.executor.open, self.seats) == ({}, [])

    def close(self) -> None:
        """Also after a test that failed."""
        self.settle(self._task.cancel)
        self.loop.close()
        for each in self._patches:
            each.stop()

    def _send(self, peer: PeerId, message: Message) -> None:
        if peer in self.down:
            raise LinkError("no link")
        self._sent.append((peer, message))
        if isinstance(message, Opened):
            assert any(map(self._may_hold, self._at(message.stage, message), [message.held] * SEATS))
        elif isinstance(message, Hidden):
            seats = self._at(message.stage - 1, message)
            assert any(seat.resumed.is_set() and message.position >= seat.forward_from for seat in seats)

    def _at(self, stage: int, message: Any) -> list[Seat]:
        """Who speaks so."""
        address = message.session, stage, message.generation
        return [seat for seat in self.seats if seat.address == address]

    def _may_hold(self, seat: Seat, held: int) -> bool:
        """So much is there, and before it begins none of what it is to be told anew."""
        asked = [part.message for part in self._parts if part.message.stages == seat.plan.stages]
        resumes = [it.resume for it in asked if isinstance(it, Reroute) and it.stage == seat.plan.stage]
        most = CONTEXT if seat.resumed.is_set() else max(resumes, default=0)
        return held <= min(most, self.executor.open[seat.key])

    async def _reach(self, peer: PeerId) -> None:
        await asyncio.sleep(0)
        if peer in self.down:
            raise LinkError("it does not answer")

    def _has_say(self, sender: PeerId, message: Any) -> bool:
        """Whether this peer may move a seat by that, or take one."""
        mine = [seat for seat in self.seats if seat.plan.session == message.session]
        match message:
            case Open():
                return bool(message.entry == sender and message.session.endswith(sender))
            case Reroute():
                start = message.stages[message.stage][1]
                return any(seat.key[1] == start and seat.entry == sender for seat in mine)
            case Close() | Renew():
                return any(seat.entry == sender for seat in mine)
        return any(_listens(seat, sender, message) for seat in self._at(message.stage, message))

    def _recipients(self, message: Any) -> set[PeerId]:
        """To whom the peer may send that, by all that it was asked to do in that chain."""
        chain = message.session, message.generation
        parts = [part for part in self._parts if (part.message.session, part.message.generation) == chain]
        last = [part for part in parts if part.message.stage == len(part.message.stages) - 1]
        match message:
            case Opened() | Failed():
                return {part.entry for part in parts if part.message.stage == message.stage}
            case Token(stage=-1):
                return {part.entry for part in last}
            case Token():
                return {part.message.stages[0][0] for part in last}
            case Hidden():
                before = [part.message.stages for part in parts if part.message.stage == message.stage - 1]
                return {stages[message.stage][0] for stages in before if message.stage < len(stages)}
        return set()


def _listens(seat: Seat, sender: PeerId, message: Any) -> bool:
    """Whether this peer may say that to a stage at that place of its chain."""
    before = seat.plan.stages[message.stage - 1][0]
    match message:
        case Token():
            return message.stage == 0 and before == sender
        case Hidden():
            return bool(message.stage > 0 and before == sender)
        case Tokens():
            return bool(message.stage == 0 and seat.entry == sender)
    return seat.entry == sender


def _state(seat: Seat) -> tuple[Any, ...]:
    """What a frame could change about a seat."""
    waiting = seat.inbox.qsize()
    return seat.plan, seat.until, seat.position, seat.held, seat.resumed.is_set(), seat.task, waiting
