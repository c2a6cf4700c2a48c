"""The stage side of sessions: what this peer does with the frames of the chains it is part of.

Each stage of each session has a *seat*. It lives on a lease that its entry renews, so nothing outlives an
entry that crashed; and it stays when a neighbour is lost, until the entry has found a way on.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from p2pllm.errors import BusyError, LinkError, P2PLLMError, RequestError, UnreachedError
from p2pllm.execution import SamplingParams
from p2pllm.scheduling import PeerId
from p2pllm.serving.stage.duty import Duty
from p2pllm.serving.stage.entry_shares import crowded_out
from p2pllm.serving.stage.seat import RESERVED_S, Seat, StageWork, size_of
from p2pllm.serving.stage.seats import Seats
from p2pllm.transport import (
    Close,
    Failed,
    Hidden,
    Message,
    Open,
    Opened,
    Renew,
    Replay,
    Reroute,
    Resume,
    Token,
    Tokens,
    Where,
)

if TYPE_CHECKING:
    from p2pllm.execution.executor import Executor

__all__ = ["Stages"]

MAX_SEATS = 1024
MAX_WAITING_BYTES = 2**29
"""Hidden states that may wait here in all, whoever sent them."""

SWEEP_S = 0.25

log = structlog.get_logger()


class Stages:
    """All seats of this peer. ``run`` owns their tasks."""

    def __init__(
        self,
        *,
        own: PeerId,
        hidden: int,
        executor: Executor,
        send: Callable[[PeerId, Message], None],
        drain: Callable[[PeerId], Awaitable[None]],
        connect: Callable[[PeerId], Awaitable[None]],
        changed: Callable[[], None],
        upload: Callable[[PeerId], float] = lambda _: 0.0,
    ) -> None:
        """``hidden`` is the width of hidden states; ``drain`` waits for room on a link, ``connect`` brings
        one up (both raise LinkError); ``changed`` is told when a seat is taken or left; ``upload`` is how
        fast the link to a peer is (bytes/s; 0: not known).
        """
        self._own = own
        self._hidden = hidden
        self._executor = executor
        self._send = send
        self._duty = Duty(executor=executor, send=send, drain=drain, connect=connect, upload=upload)
        self._changed = changed
        self._accepting = True
        self._seats = Seats()
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Serve until cancelled; then every seat is closed and its KV freed. Before and after, nobody gets
        one.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                while True:
                    await asyncio.sleep(SWEEP_S)
                    self._sweep()
        finally:
            self._tasks = None
            for seat in self._seats:
                self._vacate(seat)

    @property
    def accepting(self) -> bool:
        """Whether anybody gets a new seat. When this ends (this peer leaves), all seats are handed over."""
        return self._accepting

    @accepting.setter
    def accepting(self, value: bool) -> None:
        self._accepting = value
        self._leave()

    def hand_over(self, layers: range, reason: str) -> None:
        """Tell the entries of the seats on any of these ``layers`` to go on elsewhere; until they do so all
        goes on. Call it as long as they should: of each chain it tells once, and only when that has begun.
        """
        for seat in self._seats:
            # A chain that is being opened would not come about, and the next one meet with the same.
            if seat.has(layers) and seat.resumed.is_set() and not seat.is_handed_over:
                seat.is_handed_over = self._tell(seat.entry, Failed(*seat.address, "leaving", reason))

    def _leave(self) -> None:
        if not self._accepting:
            self.hand_over(range(sys.maxsize), "it is leaving")

    @property
    def sessions(self) -> int:
        """How many seats are taken: stages of sessions, whoever their entries are."""
        return len(self._seats)

    async def idle(self) -> None:
        """Wait until no seat is taken."""
        await self._seats.empty.wait()

    def receive(
        self, sender: PeerId, message: Open | Reroute | Resume | Replay | Where | StageWork | Close | Renew
    ) -> None:
        """Handle one frame. Frames from the wrong peer or for unknown sessions are dropped."""
        now = asyncio.get_running_loop().time()
        match message:
            case Open():
                self._open(sender, message, now)
            case Reroute():
                self._reroute(sender, message, now)
            case Resume() | Replay() | Where():
                seat = self._seats.at(message.session, message.stage, message.generation)
                if seat is not None and seat.entry == sender:
                    self._instruct(seat, message, now)
            case Tokens() | Hidden() | Token():
                self._work(sender, message)
            case Close():
                for seat in self._seats.of(message.session, sender):
                    self._vacate(seat, message.prefix)
            case Renew():
                for seat in self._seats.of(message.session, sender):
                    seat.renew(now)

    def peer_down(self, peer: PeerId) -> None:
        """The link to ``peer`` is gone: what it opened, and what it was to go on with, waits."""
        now = asyncio.get_running_loop().time()
        for seat in self._seats:
            if seat.entry == peer:
                seat.orphan(now)
            elif peer in (seat.next_peer, seat.previous_peer):
                # A frame may have been lost with the link, and nothing else would tell.
                seat.stop()
                self._tell(seat.entry, Failed(*seat.address, "cut", "the link broke", peer))

    def _open(self, sender: PeerId, plan: Open, now: float) -> None:
        seat = Seat(plan, now + RESERVED_S)
        refusal = seat.objection(sender, self._own)
        if not refusal:
            old = self._seats.holding(*seat.key)
            if old is not None and old.plan.generation < plan.generation:
                self._vacate(old)
            refusal = self._refusal(seat)
        if not refusal:
            try:
                seat.held = seat.position = self._reserve(seat)
            except P2PLLMError as error:
                refusal = str(error)
        if refusal:
            self._tell(sender, Failed(*seat.address, "busy", refusal))
            return
        self._seats.add(seat)
        self._start(seat, None)
        self._changed()

    def _reroute(self, sender: PeerId, plan: Reroute, now: float) -> None:
        seat = self._seats.holding(plan.session, plan.stages[plan.stage][1])
        if seat is None or seat.entry != sender:
            gone = Failed(plan.session, plan.stage, plan.generation, "broken", "the session is not open here")
            self._tell(sender, gone)
        elif seat.follows(plan):
            seat.stop()
            seat.clear()
            seat.plan = replace(seat.plan, stage=plan.stage, generation=plan.generation, stages=plan.stages)
            seat.resumed = asyncio.Event()
            seat.step_s, seat.step_began = 0.0, None
            seat.is_handed_over = False
            seat.until = max(seat.until, now + RESERVED_S)
            self._start(seat, plan.resume)

    def _instruct(self, seat: Seat, message: Resume | Replay | Where, now: float) -> None:
        match message:
            case Resume() if not seat.resumed.is_set():
                seat.forward_from, seat.has_begun = message.forward_from, True
                seat.renew(now)
                seat.resumed.set()
            case Replay() if seat.errand is None and self._tasks is not None:
                seat.errand = self._tasks.create_task(self._run_errand(seat, message))
            case Where():
                self._tell(seat.entry, Opened(*seat.address, seat.position, seat.pace(now)))

    def _refusal(self, seat: Seat) -> str:
        """Why there is no room for this here, or an empty string."""
        refusals = {
            "this peer is not serving": self._tasks is None,
            "the session is open already": self._seats.holding(*seat.key) is not None,
            "this peer takes no new sessions: it is leaving": not self.accepting,
            "too many sessions": len(self._seats) >= MAX_SEATS,
        }
        refusal = next((refusal for refusal, holds in refusals.items() if holds), "")
        others = (other.plan for other in self._seats)
        return refusal or crowded_out(seat.plan, others, self._executor.stats(), MAX_SEATS)

    def _work(self, sender: PeerId, work: StageWork) -> None:
        seat = self._seats.at(work.session, work.stage, work.generation)
        if seat is None or not seat.accepts(sender, work):
            return
        if isinstance(work, Hidden) and (len(work.shape) != 2 or work.shape[1] != self._hidden):
            self._fail(seat, f"hidden states are (tokens, {self._hidden})")
            return
        try:
            seat.put(work)
        except asyncio.QueueFull:
            self._fail(seat, "too much waits here already")
            return
        if size_of(work) and self._seats.waiting_bytes() > MAX_WAITING_BYTES:
            self._fail(self._seats.greediest(), "too much waits here already")

    def _sweep(self) -> None:
        """End the seats whose entries have not renewed their leases, and go on with leaving."""
        self._leave()
        now = asyncio.get_running_loop().time()
        for seat in self._seats:
            if now >= seat.until:
                log.info("session_lease_ended", session=seat.plan.session[:8], stage=seat.plan.stage)
                self._vacate(seat)

    def _start(self, seat: Seat, resume: int | None) -> None:
        if self._tasks is not None:
            seat.task = self._tasks.create_task(self._serve(seat, resume))

    def _vacate(self, seat: Seat, kept: bytes = b"") -> None:
        """Free all that a seat holds, but for the blocks that ``kept`` names."""
        self._seats.remove(seat)
        seat.stop()
        seat.clear()
        with suppress(RequestError):  # the entry names what cannot be: everything is freed all the same
            self._executor.release(seat.key, kept)
        self._changed()

    def _fail(self, seat: Seat, reason: str, cause: str = "broken") -> None:
        self._tell(seat.entry, Failed(*seat.address, cause, reason))
        self._vacate(seat)

    async def _serve(self, seat: Seat, resume: int | None) -> None:
        session, stage = seat.plan.session[:8], seat.plan.stage
        try:
            await self._duty.serve(seat, resume)
        except UnreachedError as error:
            seat.task = None
            log.info("session_waits", session=session, stage=stage, reason=str(error))
            self._tell(seat.entry, Failed(*seat.address, "unreached", str(error), error.peer))
        except P2PLLMError as error:
            seat.task = None
            log.info("session_failed", session=session, stage=stage, reason=str(error))
            self._fail(seat, str(error), "busy" if isinstance(error, BusyError) else "broken")
        except Exception:
            # A bug met by one session must not take the peer down with everybody else's sessions.
            seat.task = None
            log.exception("session_crashed", session=session, stage=stage)
            self._fail(seat, "internal error, see the log of this peer")

    async def _run_errand(self, seat: Seat, order: Replay) -> None:
        try:
            await self._duty.send_again(seat, order)
        except P2PLLMError as error:  # then whoever takes over has to wait for more
            log.info("replay_failed", session=seat.plan.session[:8], reason=str(error))
        seat.errand = None

    def _reserve(self, seat: Seat) -> int:
        """Take room for a session; returns how many of its tokens are here already."""
        plan = seat.plan
        return self._executor.reserve(
            seat.key,
            start=seat.layers.start,
            end=seat.layers.stop,
            tokens=plan.reserve,
            sampling=SamplingParams(plan.temperature, plan.top_p, plan.top_k, plan.seed),
            prefix=plan.prefix,
            owner=seat.owner,
        )

    def _tell(self, peer: PeerId, message: Message) -> bool:
        """Whether it is on its way."""
        try:
            self._send(peer, message)
        except LinkError as error:
            log.debug("entry_unreachable", peer=peer[:8], reason=str(error))
            return False
        return True
