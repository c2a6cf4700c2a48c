"""The stage side of sessions: what this peer does with the frames of the chains it is part of.

Each stage of each session has a *seat*: one task that runs the frames of its inbox through the executor, one
after the other, and sends the result on (ring decode: last stage → first stage directly, a copy to the
entry). A seat lives on a lease that its entry renews, so nothing outlives an entry that crashed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import structlog

from p2pllm.errors import LinkError, P2PLLMError, RequestError, UnreachedError
from p2pllm.execution import Activation, SamplingParams
from p2pllm.scheduling import PeerId
from p2pllm.serving.seat import Seat, StageWork
from p2pllm.transport import Close, Failed, Hidden, Message, Open, Opened, Renew, Token, Tokens

if TYPE_CHECKING:
    from p2pllm.execution.executor import Executor

__all__ = ["Stages"]

MAX_SEATS = 1024
MAX_WAITING_BYTES = 2**29
"""Hidden states that may wait here in all, whoever sent them."""

log = structlog.get_logger()


class Stages:
    """All seats of this peer. ``run`` owns their tasks.

    While ``accepting`` is False (this peer leaves) nobody gets a new seat; those taken go on.
    """

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
    ) -> None:
        """``hidden`` is the width of hidden states; ``drain`` waits for room on a link, ``connect`` brings
        one up (both raise LinkError); ``changed`` is told when a seat is taken or left.
        """
        self._own = own
        self._hidden = hidden
        self._executor = executor
        self._send = send
        self._drain = drain
        self._connect = connect
        self._changed = changed
        self.accepting = True
        self._seats: dict[tuple[str, int], Seat] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self._tasks: asyncio.TaskGroup | None = None
        self._waiting_bytes = 0

    async def run(self) -> None:
        """Serve until cancelled; then every seat is closed and its KV freed. Before and after, nobody gets
        one.
        """
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                await asyncio.Event().wait()
            finally:
                self._tasks = None

    @property
    def sessions(self) -> int:
        """How many seats are taken: stages of sessions, whoever their entries are."""
        return len(self._seats)

    async def idle(self) -> None:
        """Wait until no seat is taken."""
        await self._empty.wait()

    def receive(self, sender: PeerId, message: Open | StageWork | Close | Renew) -> None:
        """Handle one frame. Frames from the wrong peer or for unknown sessions are dropped."""
        match message:
            case Open():
                self._open(sender, message)
            case Tokens() | Hidden() | Token():
                self._work(sender, message)
            case Close():
                for seat in self._of_session(sender, message.session):
                    seat.kept = message.prefix
                    self._vacate(seat)
            case Renew():
                for seat in self._of_session(sender, message.session):
                    # One that has just run out cannot be extended any more.
                    if seat.lease is not None and not seat.lease.expired():
                        seat.lease.reschedule(asyncio.get_running_loop().time() + seat.plan.lease_s)

    def peer_down(self, peer: PeerId) -> None:
        """The link to ``peer`` is gone: what it opened ends, and what it was to go on with cannot."""
        for seat in list(self._seats.values()):
            if seat.entry == peer:
                self._vacate(seat)
            elif peer in (seat.next_peer, seat.previous_peer):
                # A frame may have been lost with the link, and nothing else would tell.
                self._tell(seat.entry, Failed(*seat.key, f"lost the link to {peer[:8]}", unreached=peer))
                self._vacate(seat)

    def _open(self, sender: PeerId, plan: Open) -> None:
        refusal = self._refusal(sender, plan)
        if refusal or self._tasks is None:
            self._tell(sender, Opened(plan.session, plan.stage, False, refusal or "this peer is not serving"))
            return
        seat = Seat(entry=sender, plan=plan)
        self._seats[seat.key] = seat
        self._empty.clear()
        seat.task = self._tasks.create_task(self._serve(seat))
        # Not a `finally` of the task: one that is cancelled before its first step never gets there.
        seat.task.add_done_callback(lambda _: self._left(seat))
        self._changed()

    def _refusal(self, sender: PeerId, plan: Open) -> str:
        """Why this Open cannot be a session here, or an empty string."""
        if plan.entry != sender:
            return "only the entry itself may open a session"
        if not 0 <= plan.stage < len(plan.stages) or plan.stages[plan.stage][0] != self._own:
            return "this stage is not mine"
        if (plan.session, plan.stage) in self._seats:
            return "the session is open already"
        if not self.accepting:
            return "this peer takes no new sessions: it is leaving"
        if len(self._seats) >= MAX_SEATS:
            return "too many sessions"
        return ""

    def _work(self, sender: PeerId, work: StageWork) -> None:
        seat = self._seats.get((work.session, work.stage))
        if seat is None or not seat.accepts(sender, work):
            return
        if isinstance(work, Hidden) and (len(work.shape) != 2 or work.shape[1] != self._hidden):
            self._tell(seat.entry, Failed(*seat.key, f"hidden states are (tokens, {self._hidden})"))
            self._vacate(seat)
            return
        if seat.inbox.full() or self._waiting_bytes + _size(work) > MAX_WAITING_BYTES:
            self._tell(seat.entry, Failed(*seat.key, "too much waits here already"))
            self._vacate(seat)
            return
        seat.inbox.put_nowait(work)
        self._waiting_bytes += _size(work)

    def _of_session(self, entry: PeerId, session: str) -> list[Seat]:
        return [seat for seat in self._seats.values() if seat.entry == entry and seat.plan.session == session]

    def _vacate(self, seat: Seat) -> None:
        if seat.task is not None:
            seat.task.cancel()

    async def _serve(self, seat: Seat) -> None:
        """The life of a seat: reserve, connect, answer, then work until the lease ends or the entry
        closes.
        """
        opened = False
        try:
            cached = self._reserve(seat)
            await self._reach_next(seat)
            self._send(seat.entry, Opened(*seat.key, True, "", cached=cached))
            opened = True
            async with asyncio.timeout(seat.plan.lease_s) as seat.lease:
                while True:
                    work = await seat.inbox.get()
                    self._waiting_bytes -= _size(work)
                    await self._step(seat, work)
        except TimeoutError:
            log.info("session_lease_ended", session=seat.plan.session[:8], stage=seat.plan.stage)
        except P2PLLMError as error:
            log.info(
                "session_failed", session=seat.plan.session[:8], stage=seat.plan.stage, reason=str(error)
            )
            unreached = error.peer if isinstance(error, UnreachedError) else ""
            failed = Failed(*seat.key, str(error), unreached)
            self._tell(seat.entry, failed if opened else Opened(*seat.key, False, str(error), unreached))
        except Exception:
            # A bug met by one session must not take the peer down with everybody else's sessions.
            log.exception("session_crashed", session=seat.plan.session[:8], stage=seat.plan.stage)
            self._tell(seat.entry, Failed(*seat.key, "internal error, see the log of this peer"))

    def _left(self, seat: Seat) -> None:
        """The seat's task is over: free what it held."""
        with suppress(RequestError):  # the entry names what cannot be: everything is freed all the same
            self._executor.release(seat.key, seat.kept)
        del self._seats[seat.key]
        if not self._seats:
            self._empty.set()
        while not seat.inbox.empty():
            self._waiting_bytes -= _size(seat.inbox.get_nowait())
        self._changed()

    def _reserve(self, seat: Seat) -> int:
        """Take room for a session; returns how many of its tokens are here already."""
        _, start, end = seat.plan.stages[seat.plan.stage]
        plan = seat.plan
        sampling = SamplingParams(plan.temperature, plan.top_p, plan.top_k, plan.seed)
        return self._executor.reserve(
            seat.key,
            start=start,
            end=end,
            tokens=plan.reserve,
            sampling=sampling,
            prefix=plan.prefix,
            owner=seat.owner,
        )

    async def _step(self, seat: Seat, work: StageWork) -> None:
        position, sample = work.position, True
        inputs: list[int] | Activation
        match work:
            case Tokens():
                inputs, rows, sample = list(work.tokens), len(work.tokens), work.sample
            case Token():
                inputs, rows = [work.token], 1
            case Hidden():
                inputs, rows, sample = (
                    Activation(work.dtype, work.shape, work.data),
                    work.shape[0],
                    work.sample,
                )
        output = await self._executor.run(seat.key, position, inputs, sample=sample and seat.last)
        if output.activation is not None:
            hidden = output.activation
            await self._forward(
                seat,
                Hidden(
                    seat.plan.session,
                    seat.plan.stage + 1,
                    position,
                    sample,
                    hidden.dtype,
                    hidden.shape,
                    hidden.data,
                ),
            )
        elif output.token is not None:
            await self._emit(seat, position + rows, output.token)

    async def _emit(self, seat: Seat, position: int, token: int) -> None:
        """Hand a sampled token round the ring first, then to the entry: the entry is not on the critical
        path.
        """
        final = "stop" if token in seat.plan.eos else "length" if position >= seat.plan.limit else ""
        if not final:
            await self._forward(seat, Token(seat.plan.session, 0, position, token, ""))
        self._send(seat.entry, Token(seat.plan.session, -1, position, token, final))

    async def _reach_next(self, seat: Seat) -> None:
        try:
            await self._connect(seat.next_peer)
        except LinkError as error:
            raise UnreachedError(seat.next_peer, str(error)) from error

    async def _forward(self, seat: Seat, message: Hidden | Token) -> None:
        # No dialling again: a seat does not outlive the link to the next stage.
        try:
            await self._drain(seat.next_peer)
            self._send(seat.next_peer, message)
        except LinkError as error:
            raise UnreachedError(seat.next_peer, str(error)) from error

    def _tell(self, peer: PeerId, message: Message) -> None:
        try:
            self._send(peer, message)
        except LinkError as error:
            log.debug("entry_unreachable", peer=peer[:8], reason=str(error))


def _size(work: StageWork) -> int:
    """Bytes that waiting costs, beside a small constant."""
    return len(work.data) if isinstance(work, Hidden) else 0
