"""Tells the swarm about this peer: seals its records, puts them into the DHT, and has news passed on."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from p2pllm.dht import DhtNode
from p2pllm.identity import Identity
from p2pllm.records import Body, MetricsBody, PeerBody, Record, SwarmKey, seal
from p2pllm.swarm.sequence import Sequence as Numbers
from p2pllm.swarm.view import GONE_S

__all__ = ["METRICS_PERIOD_S", "Publisher", "has_changed"]

METRICS_PERIOD_S: Final = 1.5
SLOW_PERIOD_S: Final = 10.0
"""How often a description is published that has not changed; oftener at first, when replicas are still being
found.
"""

SLOW_TTL_S: Final = 30.0
COALESCE_S: Final = 0.1
"""Events closer together than this share one record."""

CHECK_S: Final = 0.5
"""How often the load is looked at: a change of it is told as soon as it is seen."""

JITTER: Final = 0.1
PUT_DEADLINE_S: Final = 5.0

CHANGE: Final = 0.1
"""A change of the load by more than this share is worth telling before its time."""

NOTABLE_S: Final = 0.001
"""Times below are as good as none, and their changes worth nothing."""


def has_changed(before: MetricsBody, now: MetricsBody) -> bool:
    """Whether a peer is to say at once how it does now: other slices, or a load more than 10 % different."""
    if (before.spans, before.generation) != (now.spans, now.generation):
        return True
    times = ((before.layer_s, now.layer_s), (before.wait_s, now.wait_s))
    counts = (
        (before.running, now.running),
        (before.waiting, now.waiting),
        (before.free_kv_blocks, now.free_kv_blocks),
    )
    return any(
        abs(new - old) > CHANGE * max(old, new) and max(old, new) > least
        for pairs, least in ((times, NOTABLE_S), (counts, 0))
        for old, new in pairs
    )


class Publisher:
    """Owns this peer's sequence numbers; nobody else seals records of this identity."""

    def __init__(
        self,
        *,
        identity: Identity,
        swarm: bytes,
        secret: SwarmKey | None,
        dht: DhtNode,
        keys: Callable[[], Sequence[bytes]],
        describe: Callable[[], PeerBody],
        measure: Callable[[], MetricsBody],
        keep: Callable[[Record], None],
        flood: Callable[[bytes], None],
        rng: random.Random,
        stored: int = 0,
        clock: Callable[[], float] = time.monotonic,
        wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        """``keys`` are those of the directory for this peer now; ``keep`` takes each of its own records, and
        ``flood`` those that others are to have at once. ``stored`` is the last sequence number of an earlier
        run.
        """
        self._identity = identity
        self._swarm = swarm
        self._secret = secret
        self._dht = dht
        self._keys = keys
        self._describe = describe
        self._measure = measure
        self._keep = keep
        self._flood = flood
        self._rng = rng
        self._clock = clock
        self._wall_ms = wall_ms
        self._numbers = Numbers(identity.peer_id, clock(), stored)
        self._wake = asyncio.Event()
        self._body: PeerBody | None = None
        self._metrics: MetricsBody | None = None
        self._slow_due = 0.0
        self._slow_pause = METRICS_PERIOD_S
        self._waiting: dict[str, bytes] = {}  # by kind, until the one before it has been put
        self._putting: set[str] = set()
        self._newest: dict[str, bytes] = {}
        self.flooded = b""
        """The last description of it that all others were to have at once."""

    @property
    def seq(self) -> int:
        """The last sequence number of this identity, to be kept on disk."""
        return self._numbers.last

    def soon(self) -> None:
        """Publish within a moment instead of at the next period: something that routes care about has
        changed.
        """
        self._wake.set()

    def again(self) -> None:
        """Publish everything with the next period: the directory is cut otherwise now."""
        self._slow_due = 0.0
        self._slow_pause = METRICS_PERIOD_S

    def introduction(self) -> list[bytes]:
        """What somebody who has never heard of this peer is to know, as signed."""
        return [raw for kind, raw in self._newest.items() if kind in ("peer", "metrics")]

    def seen(self, record: Record, life: float) -> None:
        """Take in a record of this very peer that somebody holds with ``life`` seconds left.

        Raises P2PLLMError if it shows that another process uses the same identity.
        """
        self._numbers.seen(record.seq, self._clock() - max(0.0, record.ttl - life))

    async def run(self) -> None:
        """Publish for ever."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                is_event = self._wake.is_set()
                self._wake.clear()
                for body, ttl, is_news in self._due(is_event):
                    self._waiting[body.kind] = self._seal(body, ttl, flood=is_news)
                    if body.kind not in self._putting:
                        self._putting.add(body.kind)
                        tasks.create_task(self._put_waiting(body.kind))
                await asyncio.sleep(COALESCE_S)
                await self._next()

    async def publish(self, body: Body, key: bytes, ttl: float, *, flood: bool = False) -> int:
        """Seal something else that this peer has to say and put it under ``key``; how many replicas hold it.

        With ``flood`` it also goes to all others at once. Raises RecordError if it does not fit a record.
        """
        raw = self._seal(body, ttl, flood=flood)
        with suppress(TimeoutError):
            async with asyncio.timeout(PUT_DEADLINE_S):
                return await self._dht.put(key, raw)
        return 0

    def goodbye(self) -> list[bytes]:
        """Say that this peer is gone, to those who are told at once. ``put`` the records, too, afterwards."""
        bodies = replace(self._describe(), leaving=True), replace(self._measure(), spans=())
        return [self._seal(body, GONE_S, flood=True) for body in bodies]

    async def put(self, *raws: bytes) -> None:
        """Put records of this peer into the directory."""
        # Replicas that do not answer in time get the next, newer record anyway.
        with suppress(TimeoutError):
            async with asyncio.timeout(PUT_DEADLINE_S):
                await asyncio.gather(*(self._dht.put(key, raw) for key in self._keys() for raw in raws))

    def _due(self, is_event: bool) -> list[tuple[PeerBody | MetricsBody, float, bool]]:
        """What to publish now, with its time to live, and whether it is news for everybody."""
        now, body = self._clock(), self._describe()
        self._metrics = self._measure()
        due: list[tuple[PeerBody | MetricsBody, float, bool]] = [(self._metrics, GONE_S, is_event)]
        is_other = body != self._body
        if is_other or now >= self._slow_due:
            self._slow_pause = METRICS_PERIOD_S if is_other else min(2 * self._slow_pause, SLOW_PERIOD_S)
            self._body, self._slow_due = body, now + self._slow_pause
            due.insert(0, (body, SLOW_TTL_S, is_other))
        return due

    async def _next(self) -> None:
        """Wait until there is something to publish: an event, a change of load, or just the time."""
        due = self._clock() + METRICS_PERIOD_S * self._rng.uniform(1 - JITTER, 1 + JITTER) - COALESCE_S
        while (left := due - self._clock()) > 0 and not self._wake.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(min(CHECK_S, left)):
                    await self._wake.wait()
            if self._metrics is not None and has_changed(self._metrics, self._measure()):
                self._wake.set()

    def _seal(self, body: Body, ttl: float, *, flood: bool) -> bytes:
        seq = self._numbers.next(self._wall_ms())
        raw = seal(self._identity, body, swarm=self._swarm, seq=seq, ttl=ttl, secret=self._secret)
        self._keep(self._dht.open(raw))
        self._newest[body.kind] = raw
        if flood:
            self._flood(raw)
            if body.kind == "peer":
                self.flooded = raw
        return raw

    async def _put_waiting(self, kind: str) -> None:
        """Put the newest record of a kind, one at a time: what came between is out of date already."""
        try:
            while raw := self._waiting.pop(kind, b""):
                await self.put(raw)
        finally:
            self._putting.discard(kind)
