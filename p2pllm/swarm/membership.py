"""Keeps this peer in its swarm: finds the others, tells them of itself, measures the way to them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import structlog

from p2pllm.config import Address, format_addresses
from p2pllm.dht import DhtNode
from p2pllm.errors import ModelError
from p2pllm.records import SwarmBody, directory_key, swarm_id, swarms_key
from p2pllm.scheduling import PeerId
from p2pllm.swarm.prober import Prober, likely_successors
from p2pllm.swarm.publisher import Publisher
from p2pllm.swarm.view import View

__all__ = ["Membership"]

REFRESH_S = 1.0
PROBE_S = 2.0
READ_DEADLINE_S = 3.0
RETRY_FIRST_S = 1.0
RETRY_MAX_S = 15.0
CONTACT_CHECK_S = 5.0

log = structlog.get_logger()


class Membership:
    """Owner of the tasks that join, read, publish and probe; `run` ends only by cancellation or a fatal
    error.
    """

    def __init__(
        self,
        *,
        own: PeerId,
        dht: DhtNode,
        swarm: bytes,
        model: SwarmBody,
        view: View,
        publisher: Publisher,
        prober: Prober,
        bootstrap: Sequence[Address],
        new_swarm: bool,
    ) -> None:
        self._own = own
        self._dht = dht
        self._swarm = swarm
        self._model = model
        self._view = view
        self._publisher = publisher
        self._prober = prober
        self._bootstrap = tuple(bootstrap)
        self._new_swarm = new_swarm

    async def run(self) -> None:
        """Join and stay.

        Raises (in an ExceptionGroup): ModelError when the network that answered serves other models only.
        """
        joined = not self._bootstrap or await self._join()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._stay_joined(joined))
            tasks.create_task(self._publisher.run())
            tasks.create_task(self._refresh())
            tasks.create_task(self._probe())

    async def _join(self) -> bool:
        if not await self._dht.bootstrap(self._bootstrap):
            return False
        log.info(
            "bootstrap_joined",
            addresses=format_addresses(self._bootstrap),
            contacts=len(self._dht.contacts()),
        )
        if not self._new_swarm:
            await self._check_model()
        return True

    async def _check_model(self) -> None:
        """A mistyped --model must not found a second swarm unnoticed."""
        if await self._dht.read(directory_key(self._swarm)):
            return
        served = {
            record.body.fingerprint: record.body.model
            for record in await self._dht.read(swarms_key())
            if isinstance(record.body, SwarmBody) and record.swarm == swarm_id(record.body.fingerprint)
        }
        if served and self._model.fingerprint not in served:
            names = ", ".join(f"{name} ({fingerprint[:8]})" for fingerprint, name in sorted(served.items()))
            raise ModelError(
                f"the network at {format_addresses(self._bootstrap)} serves {names}, not {self._model.model} "
                f"({self._model.fingerprint[:8]}): pass the same --model, or --new-swarm to serve it too"
            )

    async def _stay_joined(self, joined: bool) -> None:
        if not self._bootstrap:
            return
        delay = RETRY_FIRST_S
        while True:
            if joined and self._dht.contacts():
                delay = RETRY_FIRST_S
                await asyncio.sleep(CONTACT_CHECK_S)
                continue
            log.warning(
                "bootstrap_unreachable", addresses=format_addresses(self._bootstrap), retry_in_s=delay
            )
            await asyncio.sleep(delay)
            delay = min(2 * delay, RETRY_MAX_S)
            joined = await self._join()

    async def _refresh(self) -> None:
        while True:
            try:
                async with asyncio.timeout(READ_DEADLINE_S):
                    for record in await self._dht.read(directory_key(self._swarm)):
                        self._view.apply(record, time.monotonic())
            except TimeoutError:
                log.debug("directory_read_timed_out")
            arrived, gone = self._view.changes(time.monotonic())
            for peer in arrived - {self._own}:
                log.info("peer_arrived", peer=peer[:8])
            for peer in gone:
                log.info("peer_gone", peer=peer[:8])
            await asyncio.sleep(REFRESH_S)

    async def _probe(self) -> None:
        while True:
            now = time.monotonic()
            own = self._view.peer(self._own, now)
            spans = own.metrics.spans if own is not None and own.metrics is not None else ()
            end = spans[0].end if spans else 0
            await self._prober.probe(
                likely_successors(self._own, end, self._model.layers, self._view.peers(now))
            )
            await asyncio.sleep(PROBE_S)
