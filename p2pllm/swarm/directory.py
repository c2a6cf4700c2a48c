"""Reads what the DHT holds of the swarm: its directory shard by shard, who leads it, and its plan.

While somebody here serves, every shard is read once a second. Otherwise digests tell who is alive, and the
records themselves are read every ten seconds. In large swarms all of it gets slower, so that what is read in
a second stays bounded.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import structlog

from p2pllm.dht import DhtNode, Digest, Held
from p2pllm.errors import RecordError
from p2pllm.identity import Identity
from p2pllm.records import (
    MAX_DIRECTORY_BITS,
    PlanBody,
    SwarmKey,
    directory_key,
    directory_keys,
    leader_key,
    plan_key,
)
from p2pllm.scheduling import PeerId
from p2pllm.swarm.widths import Widths

__all__ = ["Directory"]

SERVING_S: Final = 10.0
"""Fresh news are read for so long after somebody has asked for them."""

READ_S: Final = 1.0
GLANCE_S: Final = 2.0
FULL_S: Final = 10.0
LEADER_S: Final = 1.0
PLAN_S: Final = 10.0
ALONE_S: Final = 1.5
"""How often a peer that knows nobody looks for its own shard under another width."""

KEYS_A_ROUND: Final = 16
"""Shards that are read in the time of a round, those of 256 peers; more of them take longer."""

READ_DEADLINE_S: Final = 5.0
"""Late records are better than none; of each key one read at a time is under way."""

PLAN_SPACING_S: Final = 0.02

log = structlog.get_logger()


class Directory:
    """Owner of all that is read of one swarm. ``run`` ends only by cancellation."""

    def __init__(
        self,
        *,
        identity: Identity,
        swarm: bytes,
        secret: SwarmKey | None,
        dht: DhtNode,
        widths: Widths,
        hear: Callable[[Sequence[Held]], None],
        hint: Callable[[Sequence[Digest]], bool],
        alone: Callable[[], bool],
        leader: Callable[[], PeerId | None],
        rng: random.Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``hear`` takes the records of a key, ``hint`` digests, and says whether the records are to be read.

        ``alone`` says whether this peer knows neither another one nor who leads; ``leader`` says who does.
        """
        self._own = identity.peer_id
        self._node_id = identity.node_id
        self._swarm = swarm
        self._secret = secret
        self._dht = dht
        self._widths = widths
        self._hear = hear
        self._hint = hint
        self._alone = alone
        self._leader = leader
        self._rng = rng
        self._clock = clock
        self._serving_until = float("-inf")
        self._full_due = float("-inf")
        self._reading: set[bytes] = set()
        self._wake = asyncio.Event()
        self._plan_wake = asyncio.Event()

    def own_keys(self) -> list[bytes]:
        """Where this peer's own records belong now."""
        bits_now = self._widths.current(self._clock())
        return [directory_key(self._swarm, self._node_id, bits) for bits in bits_now]

    def serving(self) -> None:
        """Somebody needs fresh news; if none were read lately, they are now."""
        now = self._clock()
        if now >= self._serving_until:
            self._wake.set()
        self._serving_until = now + SERVING_S

    def look(self) -> None:
        """Read the directory at once: it is cut otherwise now, or something was missed."""
        self._full_due = float("-inf")
        self._wake.set()

    def doubt(self) -> None:
        """Read records and not just digests in the next round: more may have changed than digests tell."""
        self._full_due = float("-inf")

    def plan_changed(self) -> None:
        """There is, or may be, a plan that is not here yet."""
        self._plan_wake.set()

    async def run(self) -> None:
        """Read for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_leader())
            tasks.create_task(self._follow_plan())
            tasks.create_task(self._find_own_shard())
            await self._follow_shards(tasks)

    async def read_all(self) -> None:
        """Hear who leads, then everything that the directory holds."""
        await self.read_leader()
        self._full_due = self._clock() + FULL_S
        keys = self._all_keys()
        for start in range(0, len(keys), KEYS_A_ROUND):
            await asyncio.gather(*(self._read(key) for key in keys[start : start + KEYS_A_ROUND]))

    async def read_leader(self) -> None:
        """Hear who leads, or wants to."""
        await self._read(leader_key(self._swarm))

    async def _follow_shards(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            now, is_urgent = self._clock(), self._wake.is_set()
            self._wake.clear()
            is_serving = now < self._serving_until
            is_full = is_serving or now >= self._full_due
            if is_full:
                self._full_due = now + FULL_S
            keys = self._all_keys()
            period = (READ_S if is_serving else GLANCE_S) * max(1.0, len(keys) / KEYS_A_ROUND)
            started = 0
            for key in keys:
                if key not in self._reading:
                    self._reading.add(key)
                    tasks.create_task(self._look_at(key, is_full))
                started += 1
                if is_urgent and started % KEYS_A_ROUND:
                    continue  # all of them at once, but not hundreds
                if await self._woken_within(period / len(keys)):
                    break
            else:
                if is_urgent:
                    await self._woken_within(period)

    def _all_keys(self) -> list[bytes]:
        bits_now = self._widths.current(self._clock())
        return [key for bits in bits_now for key in directory_keys(self._swarm, bits)]

    async def _woken_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        return self._wake.is_set()

    async def _look_at(self, key: bytes, is_full: bool) -> None:
        """Bring what is known of a shard up to date, by digests alone unless ``is_full``."""
        try:
            if not is_full:
                async with asyncio.timeout(READ_DEADLINE_S):
                    is_full = self._hint(await self._dht.glance(key))
            if is_full:
                await self._read(key)
        except TimeoutError:
            log.debug("directory_glance_timed_out")
        finally:
            self._reading.discard(key)

    async def _read(self, key: bytes) -> list[Held]:
        try:
            async with asyncio.timeout(READ_DEADLINE_S):
                found = await self._dht.read(key)
        except TimeoutError:
            log.debug("directory_read_timed_out")
            return []
        self._hear(found)
        return found

    async def _follow_leader(self) -> None:
        while True:
            await self.read_leader()
            await asyncio.sleep(LEADER_S * self._rng.uniform(0.9, 1.1))

    async def _follow_plan(self) -> None:
        while True:
            self._plan_wake.clear()
            parts = 1
            for held in await self._read(plan_key(self._swarm, 0)):
                if held.record.peer_id != self._leader():
                    continue  # anybody can sign a plan of many parts
                with suppress(RecordError):
                    body = held.record.body(self._secret)
                    parts = max(parts, body.parts) if isinstance(body, PlanBody) else parts
            for part in range(1, parts):
                await self._read(plan_key(self._swarm, part))
                await asyncio.sleep(PLAN_SPACING_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(PLAN_S * self._rng.uniform(0.9, 1.1)):
                    await self._plan_wake.wait()

    async def _find_own_shard(self) -> None:
        """Look for others, of whom no leader tells how they cut the directory, under one width after
        another.
        """
        for bits in itertools.cycle(range(MAX_DIRECTORY_BITS + 1)):
            await asyncio.sleep(ALONE_S)
            if not self._alone():
                continue
            found = await self._read(directory_key(self._swarm, self._node_id, bits))
            if bits != self._widths.bits and any(held.record.peer_id != self._own for held in found):
                self._widths.follow(bits, self._clock())
                self.look()
