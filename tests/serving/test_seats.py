"""Seats of different entries: none can take, end or shadow another one's."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest
from support.wires import GREEDY, A, B, C, D, Wires, chain, expected, settled

from p2pllm.scheduling import PeerId
from p2pllm.serving.entry.generation import Generation
from p2pllm.transport import Failed, Message, Open, Resume


@pytest.mark.parametrize("start", [2, 3], ids=["beside it", "in its place"])
async def test_nobody_takes_a_seat_that_a_session_may_need(start: int) -> None:
    """A knows the session's id, being one of its stages, and can guess where the session goes next."""
    network = Wires({A: (0, 3), B: (3, 6), C: (2, 6), D: (0, 1)})
    generator = network.entry(D, chain((A, 0, 3), (B, 3, 6)), chain((A, 0, 3), (C, 3, 6)))
    tokens: list[int] = []
    stream = generator.generate(Generation((5,), GREEDY, 12))
    async with network.running(), aclosing(stream):
        async for event in stream:
            tokens.append(event.token)
            if len(tokens) == 3:
                ((session, _),) = network.executors[A].open
                stages = ((A, 0, start), (C, start, 6))
                plan = Open(session, 1, 1, stages, A, 16, 0.0, 1.0, 0, 0, (), 15, 60.0)
                network.deliver(A, C, plan)
                network.deliver(A, C, Resume(session, 1, 1, 0))
                network.kill(B)
        await settled(network)
    assert tokens == expected([5], 12)
    assert generator.reroutes == 1
    assert network.blamed == {B}


async def test_what_may_not_be_opened_ends_no_older_seat() -> None:
    network = Wires({A: (0, 6), B: (0, 1)})
    plan = Open("s" + B, 0, 0, ((A, 0, 6),), B, 16, 0.0, 1.0, 0, 0, (), 15, 60.0)
    refused: list[str] = []

    def watch(_sender: PeerId, message: Message) -> Message:
        if isinstance(message, Failed):
            refused.append(message.reason)
        return message

    network.tamper = watch
    network.entry(B)
    async with network.running():
        network.deliver(B, A, plan)
        (seat,) = network.stages[A]._seats
        for wrong in (replace(plan, entry=C), replace(plan, stages=((C, 0, 6),))):
            network.sender(B)(A, replace(wrong, generation=1))
        await asyncio.sleep(0.005)
        assert [*network.stages[A]._seats] == [seat]
        assert len(refused) == 2
        network.sender(B)(A, replace(plan, generation=1))
        await asyncio.sleep(0.005)
        (later,) = network.stages[A]._seats
        assert later.plan.generation == 1
