"""A swarm that is cut in half and healed: real sockets, and nothing of the parts replaced but the wires."""

from __future__ import annotations

import asyncio
import time

import pytest
from support.members import covered, leaders, part, swarm, unite, until

HEALED_S = 20.0
"""Five times what it is to take on a machine that is not busy."""


@pytest.mark.parametrize("seconds", [5, pytest.param(20, marks=pytest.mark.slow)])
async def test_a_swarm_cut_in_half_heals(seconds: int) -> None:
    async with swarm(8, room=10) as members:
        await until(lambda: covered(members) and len(leaders(members)) == 1, 20)
        (leader,) = leaders(members)
        members.sort(key=lambda member: member.id != leader)
        halves = members[::2], members[1::2]
        part(*halves)
        began = time.monotonic()
        own = [{member.id for member in half} for half in halves]
        # The half with the leader keeps it, the other one finds another among its own.
        await until(
            lambda: all(len(leaders(half)) == 1 for half in halves) and leaders(halves[1]) <= own[1], 20
        )
        assert leaders(halves[0]) == {leader}
        if seconds > 10:
            # Either half holds the model alone, once it is known that the other one is not coming back.
            await until(lambda: all(map(covered, halves)), 20)
            for half, ids in zip(halves, own, strict=True):
                assert all(member.known() == ids for member in half)
        await asyncio.sleep(began + seconds - time.monotonic())

        unite(members)
        everybody = set.union(*own)
        took = await until(lambda: len(leaders(members)) == 1 and leaders(members) <= everybody, HEALED_S)
        print(f"one leader {took:.1f} s after {seconds} s in two halves")
        await until(lambda: all(member.known() == everybody for member in members), HEALED_S)
        await until(lambda: covered(members), HEALED_S)
        assert len(leaders(members)) == 1
        for member in members:
            member.assert_followed_no_stale_plan()
        assert any(member.applied for member in members)
