"""Tells the swarm about this peer: seals its records and puts them into the DHT."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

from p2pllm.dht import DhtNode
from p2pllm.identity import Identity
from p2pllm.records import MetricsBody, PeerBody, SwarmBody, directory_key, open_record, seal, swarms_key
from p2pllm.swarm.view import View

__all__ = ["METRICS_PERIOD_S", "Publisher"]

METRICS_PERIOD_S = 1.5
METRICS_TTL_S = 6.0
SLOW_PERIOD_S = 10.0
SLOW_TTL_S = 30.0
COALESCE_S = 0.1
"""Events closer together than this share one record."""

JITTER = 0.1
PUT_DEADLINE_S = 3.0


class Publisher:
    """Owns this peer's sequence numbers; nobody else seals records of this identity."""

    def __init__(
        self,
        *,
        identity: Identity,
        dht: DhtNode,
        swarm: bytes,
        view: View,
        model: SwarmBody,
        describe: Callable[[], PeerBody],
        measure: Callable[[], MetricsBody],
        rng: random.Random,
    ) -> None:
        self._identity = identity
        self._dht = dht
        self._swarm = swarm
        self._view = view
        self._model = model
        self._describe = describe
        self._measure = measure
        self._rng = rng
        self._wake = asyncio.Event()
        self._seq = 0
        self._body: PeerBody | None = None
        self._slow_due = 0.0

    def soon(self) -> None:
        """Publish within a moment instead of at the next period: something that routes care about has
        changed.
        """
        self._wake.set()

    async def run(self) -> None:
        """Publish for ever."""
        while True:
            await self.publish()
            await asyncio.sleep(COALESCE_S)
            try:
                async with asyncio.timeout(
                    METRICS_PERIOD_S * self._rng.uniform(1 - JITTER, 1 + JITTER) - COALESCE_S
                ):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()

    async def publish(self) -> None:
        """One round: the metrics always, the slow records when they changed or are due."""
        now, body = time.monotonic(), self._describe()
        puts = [self._put(directory_key(self._swarm), self._measure(), METRICS_TTL_S)]
        if body != self._body or now >= self._slow_due:
            self._body, self._slow_due = body, now + SLOW_PERIOD_S
            puts.append(self._put(directory_key(self._swarm), body, SLOW_TTL_S))
            puts.append(self._put(swarms_key(), self._model, SLOW_TTL_S))
        try:
            async with asyncio.timeout(PUT_DEADLINE_S):
                await asyncio.gather(*puts)
        except TimeoutError:
            # Replicas that did not answer in time are retried with the next, newer record anyway.
            pass

    async def _put(self, key: bytes, body: PeerBody | MetricsBody | SwarmBody, ttl: float) -> None:
        # Wall-clock milliseconds only make the number grow across restarts; nobody reads them as a time.
        self._seq = max(self._seq, self._view.seq(self._identity.peer_id), time.time_ns() // 1_000_000) + 1
        raw = seal(self._identity, body, swarm=self._swarm, seq=self._seq, ttl=ttl)
        self._view.apply(open_record(raw), time.monotonic())
        await self._dht.put(key, raw)
