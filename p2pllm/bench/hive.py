"""Many members in one process, which does what the bench says over a pipe."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import random
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Final

import structlog

from p2pllm.bench.hostile import VICES, HostileNode
from p2pllm.bench.member import LAYERS, Member
from p2pllm.bench.samples import Samples, Setting
from p2pllm.bench.watch import Watch
from p2pllm.config import Address
from p2pllm.identity import Identity, PeerId
from p2pllm.swarm import PeerState
from p2pllm.transport import Certificate, make_certificate

__all__ = ["Hive", "live_in"]

SAMPLE_S: Final = 0.5
POLL_S: Final = 0.02
SERVING_S: Final = 1.0
LAST_EVENT_S: Final = 2.0
"""Events are made no later than this before the end, so that they can be seen everywhere."""

JOIN_LIMIT_S: Final = 30.0


def live_in(connection: Connection, setting: Setting) -> None:
    """Be the process of a hive: do what comes over the pipe until it closes."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.disable(logging.ERROR)  # so many members have much to say of each other's ends
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if sys.platform != "win32":
        import uvloop

        factory = uvloop.new_event_loop
    with suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_obey(connection, Hive(setting)))


async def _obey(connection: Connection, hive: Hive) -> None:
    try:
        while True:
            method, arguments = await asyncio.to_thread(connection.recv)
            try:
                answer = await getattr(hive, method)(*arguments)
            except Exception as error:
                answer = error
            connection.send(answer)
    except EOFError:
        pass
    finally:
        await hive.stop()


class Hive:
    """Members that live together."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._members: list[Member] = []
        self._hostile: list[HostileNode] = []
        self._rng = random.Random(setting.seed)

    async def start(
        self, numbers: Sequence[int], bootstrap: Sequence[Address], spacing_s: float
    ) -> dict[PeerId, Address]:
        """Start members with these numbers, which tell who they are; where they listen."""
        certificates = await asyncio.to_thread(lambda: [self._certificate() for _ in numbers])
        started: dict[PeerId, Address] = {}
        for number, certificate in zip(numbers, certificates, strict=True):
            member = self._member(number, bootstrap, certificate)
            await member.start()
            self._members.append(member)
            started[member.id] = member.address
            await asyncio.sleep(spacing_s)
        return started

    async def harm(self, numbers: Sequence[int], bootstrap: Address) -> None:
        """Start hostile nodes with these numbers."""
        vices = itertools.cycle(VICES)
        for number, vice in zip(numbers, vices, strict=False):
            node = HostileNode(self._identity(number), vice, random.Random(f"{self._setting.seed} {number}"))
            await node.start(bootstrap)
            self._hostile.append(node)

    async def lose(self, share: float) -> None:
        """From now on so many of the datagrams that members send get lost."""
        for member in self._members:
            member.wires.loses = lambda _: self._rng.random() < share

    async def missing(self, live: Mapping[PeerId, Address]) -> int:
        """How many of the live peers are lacking in views, or are seen elsewhere; all views together."""
        return sum(len(_lacking(member.states(), live)) for member in self._members)

    async def measure(
        self,
        live: Mapping[PeerId, Address],
        dead: Collection[PeerId],
        seconds: float,
        events_per_s: float | None,
    ) -> Samples:
        """Watch for so many seconds. Members serve, with so many events here, unless that is None."""
        watches = [Watch(member) for member in self._members]
        samples = Samples(members=len(self._members), seconds=seconds)
        began, cpu = time.monotonic(), time.process_time()
        async with asyncio.TaskGroup() as tasks:
            sampling = tasks.create_task(self._sample(samples, live, dead))
            serving = (
                None
                if events_per_s is None
                else tasks.create_task(self._serve(samples, seconds, events_per_s))
            )
            await asyncio.sleep(seconds)
            sampling.cancel()
            if serving is not None:
                serving.cancel()
        samples.cpu_s = time.process_time() - cpu
        samples.ended = time.monotonic()
        samples.seconds = samples.ended - began
        for watch in watches:
            watch.end(samples)
        return samples

    async def join(self, number: int, bootstrap: Address, live: Mapping[PeerId, Address]) -> float | None:
        """Seconds until a new member has all the live ones in its view; None if it never does."""
        certificate = await asyncio.to_thread(self._certificate)
        member = self._member(number, [bootstrap], certificate)
        began = time.monotonic()
        await member.start()
        try:
            while _lacking(member.states(), live):
                if time.monotonic() - began > JOIN_LIMIT_S:
                    return None
                await asyncio.sleep(POLL_S)
            return time.monotonic() - began
        finally:
            await member.stop(goodbye=True)

    async def stop(self) -> None:
        """Stop all of them."""
        members = (member.stop() for member in self._members)
        await asyncio.gather(*members, *(node.stop() for node in self._hostile))
        self._members, self._hostile = [], []

    def _member(self, number: int, bootstrap: Sequence[Address], certificate: Certificate | None) -> Member:
        rng = random.Random(f"{self._setting.seed} {number}")
        return Member(
            self._identity(number),
            bootstrap=bootstrap,
            certificate=certificate,
            room=rng.randint(LAYERS // 4, LAYERS // 2),
            rng=rng,
        )

    def _identity(self, number: int) -> Identity:
        return Identity.from_seed(hashlib.sha256(f"{self._setting.seed} {number}".encode()).digest())

    def _certificate(self) -> Certificate | None:
        return make_certificate() if self._setting.encrypted else None

    async def _sample(
        self, samples: Samples, live: Mapping[PeerId, Address], dead: Collection[PeerId]
    ) -> None:
        began = last_dead = time.monotonic()
        while True:
            # The numbers of records are milliseconds of the wall clock, and this machine has only one.
            wall_ms = time.time() * 1000
            for member in self._members:
                states, view = member.states(), member.swarm.view
                others = [peer for peer in live if peer != member.id]
                lacking = _lacking(states, live)
                samples.looked += len(others)
                samples.missing += len(lacking)
                samples.ages += [(wall_ms - view.seq(peer)) / 1000 for peer in others if peer not in lacking]
                if not states.keys().isdisjoint(dead):
                    last_dead = time.monotonic()
            now = time.monotonic()
            samples.gone_s = last_dead - began if now - last_dead > SAMPLE_S else None
            await asyncio.sleep(SAMPLE_S)

    async def _serve(self, samples: Samples, seconds: float, events_per_s: float) -> None:
        """Have all members want fresh news, and now and then one open or close a chain."""
        end = time.monotonic() + seconds
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._events(samples, events_per_s, end - LAST_EVENT_S))
            while True:
                for member in self._members:
                    member.swarm.serving()
                await asyncio.sleep(SERVING_S)

    async def _events(self, samples: Samples, per_s: float, end: float) -> None:
        while True:
            await asyncio.sleep(self._rng.uniform(0.5, 1.5) / per_s)
            if time.monotonic() > end:
                return
            member = self._rng.choice(self._members)
            member.running += 1
            samples.events.append((member.id, member.running, time.monotonic()))
            member.swarm.soon()


def _lacking(states: Mapping[PeerId, PeerState], live: Mapping[PeerId, Address]) -> set[PeerId]:
    """Those of the live peers that are not seen where they are."""
    return {
        peer
        for peer, address in live.items()
        if peer not in states or address not in states[peer].body.addresses
    }
