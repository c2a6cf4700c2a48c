"""A swarm of real peers to which things happen: kill -9 and restart, a freeze, a cut link; by a seed."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from p2pllm.errors import P2PLLMError
from support.client import swarm_of, until_ready
from support.processes import Process, Swarm, api_of, swarm
from support.proxies import Proxy, free_port

__all__ = ["Chaos", "Member", "chaos"]

FREEZE_S = 3.0
MEMORY = "1GiB"
"""So that a peer has as much room for KV caches in every one of its lives."""

SEEN_S = 6.0
"""After a peer is back, others may avoid it for so long."""


class Member:
    """A peer that others reach through a proxy; the same identity and layers in all its lives."""

    def __init__(self, made: Swarm, folder: Path, layers: range) -> None:
        self.layers = layers
        self.well = False
        self.url = ""
        self.peer = ""
        self.struck: list[float] = []
        """When it was killed or frozen (s of the loop's clock)."""

        self.lives: list[Process] = []
        self._swarm = made
        self._folder = folder
        self._port = free_port()
        self.proxy = Proxy(self._port)

    async def start(self) -> None:
        """Start its process and wait until it is ready and in its own view."""
        arguments = ["--layers", f"{self.layers.start}:{self.layers.stop}", "--port", str(self._port)]
        arguments += ["--advertise", f"127.0.0.1:{self.proxy.port}", "--memory", MEMORY]
        process = self._swarm.join(*arguments, "--data-dir", str(self._folder))
        self.lives.append(process)
        await asyncio.to_thread(process.event, "ready")
        self.url, self.peer = api_of(process), process.event("peer_listening")["peer"]
        self.well = True

    async def kill(self, down_s: float) -> None:
        """kill -9, and start it again after so many seconds."""
        self._strike()
        await asyncio.to_thread(self.lives[-1].kill)
        await asyncio.sleep(down_s)
        await self.start()

    async def freeze(self) -> None:
        """kill -STOP, and -CONT after a while."""
        self._strike()
        self.lives[-1].popen.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(FREEZE_S)
        finally:
            self.lives[-1].popen.send_signal(signal.SIGCONT)
        self.well = True

    def _strike(self) -> None:
        self.well = False
        self.struck.append(asyncio.get_running_loop().time())


class Chaos:
    """Strikes at ``members`` one after the other, as the generator ``rng`` will have it."""

    def __init__(self, members: list[Member], rng: random.Random) -> None:
        self.members = members
        self.holes: list[tuple[float, float]] = []
        """From when to when some layer had no holder that was well, with the time it takes to get about."""

        self.done: dict[str, int] = dict.fromkeys(("kill", "freeze", "cut", "hole"), 0)
        self._rng = rng
        self._began = asyncio.get_running_loop().time()
        self._layers = max(member.layers.stop for member in members)

    async def run(self, seconds: float) -> None:
        """Strike for so long, and leave everybody well."""
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self._watch())
            try:
                await self._strike_for(seconds)
            finally:
                watch.cancel()

    async def _strike_for(self, seconds: float) -> None:
        end = asyncio.get_running_loop().time() + seconds
        async with asyncio.TaskGroup() as under_way:
            while asyncio.get_running_loop().time() < end:
                await asyncio.sleep(self._rng.uniform(2, 5))
                self._strike(under_way.create_task)

    def _strike(self, start: Callable[[Coroutine[Any, Any, None]], Any]) -> None:
        rng = self._rng
        kind, ruthless = rng.choice(("kill", "freeze", "cut")), rng.random() < 0.15
        if kind == "cut":
            self.done[kind] += any(rng.choice(self.members).proxy.cut(rng) for _ in range(3))
            return
        well = [member for member in self.members if member.well]
        targets = [member for member in well if ruthless or self._covered(set(well) - {member})]
        if targets:
            target = rng.choice(targets)
            start(target.kill(rng.uniform(0, 3)) if kind == "kill" else target.freeze())
            self.done[kind] += 1

    def covered(self) -> bool:
        """Whether every layer has a holder that is well."""
        return self._covered({member for member in self.members if member.well})

    def _covered(self, members: set[Member]) -> bool:
        return {layer for member in members for layer in member.layers} == set(range(self._layers))

    async def _watch(self) -> None:
        """Note when a layer has no holder."""
        clock = asyncio.get_running_loop().time
        while True:
            while self.covered():
                await asyncio.sleep(0.02)
            self.done["hole"] += 1
            since = max([clock(), *(until for _, until in self.holes)])
            try:
                while not self.covered():
                    await asyncio.sleep(0.02)
            finally:
                self.holes.append((since, clock() + SEEN_S))

    def excuses(self, entry: Member, began: float, ended: float) -> bool:
        """Whether a request may have failed: its entry was struck, or there was no way."""
        return self.stopped_s(entry, began, ended) > 0 or self.missing_s(began, ended) > 0

    def missing_s(self, began: float, ended: float) -> float:
        """For how long of that time there was no way on (s)."""
        return sum(max(0.0, min(ended, until) - max(began, since)) for since, until in self.holes)

    def stopped_s(self, entry: Member, began: float, ended: float) -> float:
        """For how long of that time the entry itself was frozen (s), at most."""
        return FREEZE_S * sum(began - FREEZE_S <= when <= ended for when in entry.struck)

    def told(self, entry: Member, times: list[float]) -> str:
        """One line on a request, for whoever must find out what went wrong."""
        waits = [later - earlier for earlier, later in itertools.pairwise(times)]
        excused = "excused" if self.excuses(entry, times[0], times[-1]) else ""
        span = f"{times[0] - self._began:6.1f} to {times[-1] - self._began:6.1f} s"
        return f"{span}, longest wait {max(waits):5.2f}, {entry.peer[:8]} {excused:7} {len(times) - 2:3}"

    async def free_blocks(self) -> dict[str, int]:
        """Free KV blocks of each peer, by its own account."""
        found = {}
        for member in self.members:
            for peer in (await swarm_of(member.url))["peers"]:
                if peer["peer"] == member.peer:
                    found[member.peer] = peer["free_kv_blocks"]
        return found

    async def settled(self, idle: dict[str, int], limit_s: float) -> None:
        """Wait until all KV blocks are free again."""
        async with asyncio.timeout(limit_s):
            while True:
                try:
                    if await self.free_blocks() == idle:
                        return
                except P2PLLMError:
                    pass  # it was just started
                await asyncio.sleep(0.3)


@asynccontextmanager
async def chaos(folder: Path, layers: list[range], seed: int) -> AsyncIterator[Chaos]:
    """Start a peer per range of layers, to be struck by what follows from ``seed``; stop them at the end."""
    with swarm(folder) as made:
        members = [Member(made, folder / f"m{number}", span) for number, span in enumerate(layers)]
        try:
            for member in members:
                await member.proxy.open()
            await asyncio.gather(*(member.start() for member in members))
            await until_ready(*(member.url for member in members))
            yield Chaos(members, random.Random(seed))
        finally:
            for process in made.processes:
                if process.popen.poll() is None:
                    process.popen.send_signal(signal.SIGCONT)
            await asyncio.to_thread(made.close)
            for member in members:
                await member.proxy.close()
