"""Trying several addresses, with dials that the test plays."""

from __future__ import annotations

import asyncio

from p2pllm.errors import LinkError
from p2pllm.transport.dialling import dial_any

DEADLINE_S = 20.0
ONE, TWO, THREE = ("192.0.2.1", 1), ("2001:db8::2", 2), ("three.example", 3)


class Dials:
    """Plays what each address does: answer, hang, or fail with a reason."""

    def __init__(self, **behaviour):
        self.behaviour = behaviour
        self.started = []
        self.cancelled = []

    async def __call__(self, address):
        name = {ONE: "one", TWO: "two", THREE: "three"}[address]
        self.started.append(name)
        what = self.behaviour[name]
        if what == "hang":
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.append(name)
        if isinstance(what, Exception):
            raise what


async def test_the_first_that_works_is_enough():
    dials = Dials(one=None, two=None)
    assert await dial_any([ONE, TWO], dials, DEADLINE_S) == ""
    assert dials.started == ["one"]


async def test_one_that_fails_is_followed_by_the_next_at_once():
    dials = Dials(one=LinkError("no"), two=OSError("none"), three=None)
    # The stagger alone would take longer than there is time.
    assert await dial_any([ONE, TWO, THREE], dials, 0.2) == ""
    assert dials.started == ["one", "two", "three"]


async def test_one_that_hangs_is_overtaken_and_given_up():
    dials = Dials(one="hang", two="hang", three=None)
    async with asyncio.timeout(DEADLINE_S):
        assert await dial_any([ONE, TWO, THREE], dials, 100 * DEADLINE_S) == ""
    assert dials.started == ["one", "two", "three"]
    assert sorted(dials.cancelled) == ["one", "two"]


async def test_a_slow_one_is_not_given_up_when_the_next_fails():
    opened = asyncio.Event()

    async def dial(address):
        if address == ONE:
            await opened.wait()
        else:
            opened.set()
            raise LinkError("refused")

    async with asyncio.timeout(DEADLINE_S):
        assert await dial_any([ONE, TWO], dial, 100 * DEADLINE_S) == ""


async def test_when_none_works_each_has_its_reason():
    dials = Dials(one=LinkError("refused"), two="hang", three=OSError("no route"))
    reason = await dial_any([ONE, TWO, THREE], dials, 0.4)
    assert reason == "192.0.2.1:1: refused; [2001:db8::2]:2: does not answer; three.example:3: no route"
    assert dials.cancelled == ["two"]
    assert await dial_any([], dials, DEADLINE_S) == "it has published no address"


async def test_an_address_that_is_named_twice_is_dialled_once():
    dials = Dials(one=LinkError("no"))
    assert await dial_any([ONE, ONE], dials, DEADLINE_S) == "192.0.2.1:1: no"
    assert dials.started == ["one"]


async def test_whoever_cancels_it_leaves_nothing_behind():
    dials = Dials(one="hang", two="hang")
    dial = asyncio.create_task(dial_any([ONE, TWO], dials, DEADLINE_S))
    async with asyncio.timeout(DEADLINE_S):
        while len(dials.started) < 2:
            await asyncio.sleep(0.01)
    dial.cancel()
    await asyncio.wait({dial})
    assert dial.cancelled()
    assert sorted(dials.cancelled) == ["one", "two"]
