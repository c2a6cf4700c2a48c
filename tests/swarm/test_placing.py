"""Phase 1 on another thread: the event loop goes on, and nobody is left behind."""

from __future__ import annotations

import asyncio
import threading

import pytest

from p2pllm.errors import ModelError
from p2pllm.scheduling import Assignment, Capacity, Offer, Plan
from p2pllm.swarm.latency import UNMEASURED
from p2pllm.swarm.placement.placing import Facts, Placing, Question, place_now

DEADLINE_S = 10.0


def question(*rooms: int) -> Question:
    offers = tuple(
        Offer(
            peer=f"p{number}",
            region="eu",
            capacity=Capacity.same(room),
            layer_s=0.001,
            head_s=0.001,
            kv_bytes=2**20,
            flops=1e12,
        )
        for number, room in enumerate(rooms)
    )
    return Question(12, offers, Facts((), UNMEASURED, Assignment()))


class Host:
    """A thread that waits until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.answered: list[Question] = []
        self.done = asyncio.Event()
        self.placing = Placing(self.done.set, self._answer)

    def _answer(self, asked: Question) -> Plan:
        assert self.go.wait(DEADLINE_S)
        self.answered.append(asked)
        return place_now(asked)

    async def until_done(self) -> None:
        self.go.set()
        async with asyncio.timeout(DEADLINE_S):
            await self.done.wait()
        self.done.clear()
        self.go.clear()


async def test_an_answer_comes_later_and_is_the_same() -> None:
    host, asked = Host(), question(6, 6, 12)
    assert host.placing(asked) is None
    assert host.placing(asked) is None
    await host.until_done()
    plan = host.placing(asked)
    assert plan is not None
    assert plan.assignment == place_now(asked).assignment
    assert host.answered == [asked]


async def test_what_cannot_be_placed_is_said_to_who_asked() -> None:
    host, asked = Host(), question(5)
    assert host.placing(asked) is None
    await host.until_done()
    with pytest.raises(ModelError, match="7 layers are missing"):
        host.placing(asked)


async def test_a_question_that_was_given_up_holds_up_the_next_but_its_answer_is_nobodys() -> None:
    host, given_up, asked = Host(), question(5), question(12)
    assert host.placing(given_up) is None
    assert host.placing(asked) is None
    assert host.answered == []
    await host.until_done()
    assert host.placing(asked) is None
    await host.until_done()
    plan = host.placing(asked)
    assert plan is not None
    assert plan.assignment == place_now(asked).assignment
    assert host.answered == [given_up, asked]
