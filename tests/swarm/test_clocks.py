"""Peers whose clocks are wrong by an hour: nobody believes a clock of somebody else."""

from __future__ import annotations

import asyncio
import time
from contextvars import ContextVar, copy_context

import pytest
from support.members import Witness, covered, leaders, until

HOUR_S = 3600

wrong_by: ContextVar[int] = ContextVar("wrong_by", default=0)
"""Seconds by which the wall clock of the running peer is wrong: all its tasks inherit it."""


@pytest.fixture(autouse=True)
def own_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, nanoseconds = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: seconds() + wrong_by.get())
    monkeypatch.setattr(time, "time_ns", lambda: nanoseconds() + wrong_by.get() * 10**9)


async def start(member: Witness, clock: int) -> None:
    """Start a peer whose wall clock is wrong by ``clock`` seconds."""

    def run() -> asyncio.Task[None]:
        wrong_by.set(clock)
        return asyncio.create_task(member.start())

    await copy_context().run(run)


@pytest.mark.parametrize(
    "clocks",
    [(HOUR_S, 0, -HOUR_S, 0), pytest.param((-HOUR_S, HOUR_S, 0, -HOUR_S), marks=pytest.mark.slow)],
)
async def test_they_are_seen_publish_and_lead(clocks: tuple[int, ...]) -> None:
    members: list[Witness] = []
    try:
        for number, clock in enumerate(clocks):
            members.append(Witness(number, members[:1], room=10))
            await start(members[-1], clock)
        ids = {member.id for member in members}
        await until(lambda: all(member.known() == ids for member in members) and covered(members), 20)
        assert leaders(members) == {members[0].id}  # it came first, whatever its clock says
        numbers = [members[1].swarm.view.seq(member.id) / 1000 for member in members]
        assert [round((number - numbers[0]) / HOUR_S) for number in numbers] == [
            (clock - clocks[0]) // HOUR_S for clock in clocks
        ]

        # What they go on saying is believed, and nobody is taken for dead.
        for member in members:
            member.running += 1
            member.swarm.soon()
        await until(lambda: all(said(one, other) == 1 for one in members for other in members), 10)
        ends = time.monotonic() + 6.5  # longer than a peer is kept without news
        while time.monotonic() < ends:
            assert all(member.known() == ids for member in members)
            await asyncio.sleep(0.05)

        # The next leader has another clock, and plans for the rest: nothing to do, but somebody must say so.
        await members.pop(0).stop()
        await until(lambda: len(leaders(members)) == 1 and leaders(members) <= {m.id for m in members}, 20)
    finally:
        await asyncio.gather(*(member.stop() for member in members))


def said(viewer: Witness, peer: Witness) -> int:
    """How many sessions one peer has, as another sees it."""
    state = viewer.swarm.view.peer(peer.id, time.monotonic())
    assert state is not None
    assert state.metrics is not None
    return state.metrics.running
