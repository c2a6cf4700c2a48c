"""Whole peers without a model in one process: they start, are cut off from each other, and are watched."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager

from p2pllm.bench.member import LAYERS, Member, Memory
from p2pllm.identity import Identity
from p2pllm.swarm import SwarmPlan

__all__ = ["Witness", "covered", "leaders", "part", "swarm", "unite", "until"]


class Witness(Member):
    """A member that writes down each plan that was to count, and each that gave it another slice."""

    def __init__(self, number: int, bootstrap: Sequence[Member], *, room: int, memory: Memory | None = None):
        super().__init__(
            Identity.from_seed(bytes([number]) * 32),
            bootstrap=[member.address for member in bootstrap],
            room=room,
            memory=memory,
            rng=random.Random(number),
        )
        self.plans: list[SwarmPlan] = []
        self.applied: list[tuple[SwarmPlan, int]] = []
        """With the generation that the peer was in."""

    def on_plan(self, plan: SwarmPlan) -> None:
        self.plans.append(plan)
        generation = self.allocation.generation
        if self.allocation.follow(plan):
            self.applied.append((plan, generation))

    def known(self) -> set[str]:
        """The peers that it sees."""
        return set(self.states())

    def assert_followed_no_stale_plan(self) -> None:
        keys = [plan.key for plan in self.plans]
        assert keys == sorted(set(keys))
        for plan, generation in self.applied:
            entry = plan.entry(self.id)
            assert entry is not None
            assert entry.generation == generation


@asynccontextmanager
async def swarm(count: int, *, room: int) -> AsyncIterator[list[Witness]]:
    """Members that all see each other."""
    members: list[Witness] = []
    try:
        for number in range(count):
            members.append(Witness(number, members[:1], room=room))
            await members[-1].start()
        ids = {member.id for member in members}
        await until(lambda: all(member.known() == ids for member in members), 25)
        yield members
    finally:
        await asyncio.gather(*(member.stop() for member in members))


async def until(true: Callable[[], bool], limit: float) -> float:
    """Seconds until something is so; TimeoutError if it does not come to be."""
    began = time.monotonic()
    async with asyncio.timeout(limit):
        while not true():
            await asyncio.sleep(0.02)
    return time.monotonic() - began


def part(*sides: Collection[Member]) -> None:
    """Cut all ways between members of different sides."""
    for side in sides:
        others = [member for other in sides if other is not side for member in other]
        ports, ids = {member.address[1] for member in others}, {member.id for member in others}
        for member in side:
            member.wires.loses = lambda address, ports=ports: address[1] in ports  # type: ignore[misc]
            member.wires.parts = ids.__contains__


def unite(members: Collection[Member]) -> None:
    """Heal all ways."""
    for member in members:
        member.wires.loses = member.wires.parts = lambda _: False


def leaders(members: Collection[Member]) -> set[str | None]:
    """Whom they take for their leader."""
    return {member.swarm.leadership.leader for member in members}


def covered(members: Collection[Member]) -> bool:
    """Whether they hold all layers, ready."""
    held = {
        layer
        for member in members
        for span in member.allocation.spans()
        if span.state == "ready"
        for layer in range(span.start, span.end)
    }
    return held == set(range(LAYERS))
