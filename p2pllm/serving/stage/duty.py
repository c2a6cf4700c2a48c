"""What a seat's task does from one chain of its session to the next.

It makes sure of the way to the next stage, answers the entry, and waits until all stages have done so. Then
it sends the next stage what that one lacks. From there on it runs what comes in through the executor and
sends on what comes of that (ring decode: last stage → first stage directly, a copy to the entry).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from p2pllm.errors import LinkError, UnreachedError
from p2pllm.execution import Activation, StageOutput
from p2pllm.scheduling import PeerId
from p2pllm.serving.stage.rounding import received, rounded
from p2pllm.serving.stage.seat import Seat, StageWork
from p2pllm.transport import ENTRY_STAGE, Hidden, Message, Opened, Replay, Token, Tokens

if TYPE_CHECKING:
    from p2pllm.execution.executor import Executor

__all__ = ["Duty"]

_REPLAY_TOKENS = 256
"""Tokens per frame: what is sent again overlaps with what the next stage makes of it."""


class Duty:
    """How this peer serves seats, whichever they are. Methods raise P2PLLMError when a seat cannot go on."""

    def __init__(
        self,
        *,
        executor: Executor,
        send: Callable[[PeerId, Message], None],
        drain: Callable[[PeerId], Awaitable[None]],
        connect: Callable[[PeerId], Awaitable[None]],
        upload: Callable[[PeerId], float],
    ) -> None:
        """``drain`` waits for room on a link, ``connect`` brings one up; both, and ``send``, raise
        LinkError. ``upload`` is how fast the link to a peer is (bytes/s; 0: not known).
        """
        self._executor = executor
        self._send = send
        self._drain = drain
        self._connect = connect
        self._upload = upload

    async def serve(self, seat: Seat, resume: int | None) -> None:
        """Serve until cancelled; ``resume`` is the position to go back to, None for a new seat.

        Raises UnreachedError when only a neighbour is out of reach.
        """
        if resume is not None:
            seat.held = seat.position = await self._executor.take_back(seat.key, resume)
        await self._reach(seat.next_peer)
        self._send(seat.entry, Opened(*seat.address, seat.held))
        await seat.resumed.wait()
        if not seat.last:
            await self._replay(seat, seat.forward_from, seat.held, seat.next_peer, seat.next_address)
        while True:
            await self._step(seat, await seat.take())

    async def send_again(self, seat: Seat, order: Replay) -> None:
        """Send what was sent before to a stage of the next chain."""
        await self._reach(order.peer)
        address = order.session, order.to_stage, order.to_generation
        await self._replay(seat, order.start, min(order.end, seat.position), order.peer, address)

    async def _replay(
        self, seat: Seat, start: int, end: int, peer: PeerId, address: tuple[str, int, int]
    ) -> None:
        """Send once more what was sent for positions [start, end)."""
        for first in range(start, end, _REPLAY_TOKENS):
            for begin, stop, was_rounded in seat.rounding.parts(first, min(first + _REPLAY_TOKENS, end)):
                kept = await self._executor.outputs(seat.key, begin, stop)
                kept = await rounded(kept) if was_rounded else kept
                await self._forward(peer, _hidden(address, begin, kept, sample=False))

    async def _step(self, seat: Seat, work: StageWork) -> None:
        position, sample = work.position, True
        inputs: list[int] | Activation
        match work:
            case Tokens():
                inputs, rows, sample = list(work.tokens), len(work.tokens), work.sample
            case Token():
                inputs, rows = [work.token], 1
            case Hidden():
                inputs = await received(Activation(work.dtype, work.shape, work.data))
                rows, sample = work.shape[0], work.sample
        began = asyncio.get_running_loop().time()
        output = await self._run(seat, position, inputs, rows, sample=sample)
        compute_s = asyncio.get_running_loop().time() - began
        seat.position = position + rows
        if output.activation is not None:
            skipped = max(0, seat.forward_from - position)
            if skipped < rows:
                hidden, first = output.activation.rows(skipped, rows), position + skipped
                if seat.rounding.decide(
                    first, hidden, upload=self._upload(seat.next_peer), compute_s=compute_s
                ):
                    hidden = await rounded(hidden)
                message = _hidden(seat.next_address, first, hidden, sample=sample)
                await self._forward(seat.next_peer, message)
        elif output.token is not None:
            await self._emit(seat, position + rows, output.token)

    async def _run(
        self, seat: Seat, position: int, inputs: list[int] | Activation, rows: int, *, sample: bool
    ) -> StageOutput:
        """Run a piece of work, and note how long a decode step takes, waiting included."""
        clock = asyncio.get_running_loop().time
        began = clock()
        seat.step_began = began if rows == 1 else None
        try:
            return await self._executor.run(seat.key, position, inputs, sample=sample and seat.last)
        finally:
            if seat.step_began is not None:
                seat.step_s, seat.step_began = clock() - began, None

    async def _emit(self, seat: Seat, position: int, token: int) -> None:
        """Hand a sampled token round the ring first, then to the entry: the entry is not on the critical
        path.
        """
        session, _, generation = seat.address
        final = "stop" if token in seat.plan.eos else "length" if position >= seat.plan.limit else ""
        if not final:
            await self._forward(seat.next_peer, Token(session, 0, generation, position, token, ""))
        self._send(seat.entry, Token(session, ENTRY_STAGE, generation, position, token, final))

    async def _reach(self, peer: PeerId) -> None:
        try:
            await self._connect(peer)
        except LinkError as error:
            raise UnreachedError(peer, str(error)) from error

    async def _forward(self, peer: PeerId, message: Hidden | Token) -> None:
        # No dialling again: with a link, frames may have been lost.
        try:
            await self._drain(peer)
            self._send(peer, message)
        except LinkError as error:
            raise UnreachedError(peer, str(error)) from error


def _hidden(address: tuple[str, int, int], position: int, rows: Activation, *, sample: bool) -> Hidden:
    return Hidden(*address, position, sample, rows.dtype, rows.shape, rows.data)
