"""Passes news on at once, over a few links to random peers that are kept up for it.

Each peer chooses a few neighbours and is chosen by as many, which connects all but surely (random graphs of
out-degree 2 and more do). Nothing depends on it: what a flood misses, the DHT brings.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection, Sequence
from typing import Final

import structlog

from p2pllm.errors import FrameError, LinkError, RecordError
from p2pllm.records import Record, peek
from p2pllm.scheduling import PeerId
from p2pllm.swarm.backoff import BackOff
from p2pllm.swarm.flood import Flood
from p2pllm.swarm.view import View
from p2pllm.transport import Gossip, Links

__all__ = ["CHOSEN", "Gossiper"]

CHOSEN: Final = 3
"""Neighbours of a peer's own choice."""

MAX_CHOOSERS: Final = 9
"""Peers that chose this one and are served; three are to be expected."""

BATCH_S: Final = 0.1
"""Records wait for each other so long at most."""

KEEP_S: Final = 1.0
"""How often a peer looks after its neighbours."""

SEEK_S: Final = 0.25
"""The same while there are too few."""

RENEW_S: Final = 10.0
"""How often a chosen neighbour is reminded that it is one."""

FORGET_S: Final = 30.0
FIRST_RETRY_S: Final = 2.0
LAST_RETRY_S: Final = 60.0

log = structlog.get_logger()


class Gossiper:
    """Owner of the flood of one peer and of its neighbours."""

    def __init__(
        self,
        *,
        own: PeerId,
        swarm: bytes,
        links: Links,
        view: View,
        open_checked: Callable[[bytes], Record],
        accept: Callable[[Record], bool],
        introduce: Callable[[], Sequence[bytes]],
        renew: Callable[[], bytes],
        rng: random.Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``open_checked`` checks a record as `open_record` does; ``accept`` takes it in and says whether it
        was news.

        ``introduce`` gives what a new neighbour is to know of this peer, and ``renew`` a record that all have
        seen before, which reminds it.
        """
        self._own = own
        self._swarm = swarm
        self._links = links
        self._view = view
        self._open_checked = open_checked
        self._accept = accept
        self._introduce = introduce
        self._renew = renew
        self._rng = rng
        self._clock = clock
        self._flood = Flood()
        self._chosen: dict[PeerId, float] = {}  # when they are to be reminded
        self._choosers: dict[PeerId, float] = {}  # when they were heard
        self._unreached = BackOff(FIRST_RETRY_S, LAST_RETRY_S)
        self._something = asyncio.Event()

    @property
    def neighbours(self) -> Collection[PeerId]:
        """Whom news go to."""
        return self._chosen.keys() | self._choosers.keys()

    def tell(self, raw: bytes) -> None:
        """Have all others know one of this peer's own records."""
        self._flood.spread(raw)
        self._something.set()

    def receive(self, sender: PeerId, message: Gossip) -> None:
        """Take in what a neighbour passes on, or anybody else who has a link."""
        now = self._clock()
        if sender in self._choosers or len(self._choosers) < MAX_CHOOSERS:
            self._choosers[sender] = now
        for raw in message.records:
            if not self._flood.hear(sender, raw, now):
                continue
            try:
                is_news = self._is_news(raw)
            except RecordError as error:
                self._flood.mute(sender, now)
                log.warning("gossip_refused", peer=sender[:8], reason=str(error))
                break
            if is_news:
                self._flood.spread(raw, sender)
                self._something.set()

    def link_down(self, peer: PeerId) -> None:
        """The link to a peer is gone; if it was chosen, another one takes its place."""
        self._chosen.pop(peer, None)
        self._choosers.pop(peer, None)

    async def run(self) -> None:
        """Pass on and look after the neighbours, for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pass_on())
            while True:
                await self._look_after()
                pause = KEEP_S if len(self._chosen) >= CHOSEN else SEEK_S
                await asyncio.sleep(pause * self._rng.uniform(0.75, 1.25))

    def pass_on_now(self) -> None:
        """Send what waits."""
        for peer, records in self._flood.batches(self.neighbours).items():
            self._send(peer, records)

    def _is_news(self, raw: bytes) -> bool:
        header = peek(raw)
        if header.swarm != self._swarm or header.kind == "swarm":
            raise RecordError("a record of another swarm, or for nobody here")
        is_known_kind = header.kind in ("peer", "metrics")
        if is_known_kind and not self._view.is_newer(header.peer_id, header.kind, header.seq):
            return False
        return self._accept(self._open_checked(raw))

    async def _pass_on(self) -> None:
        while True:
            await self._something.wait()
            # Peers that wait unlike long hear from one before they send to it themselves.
            await asyncio.sleep(self._rng.uniform(0, BATCH_S))
            self._something.clear()
            self.pass_on_now()
            if not self._flood.idle:
                self._something.set()

    async def _look_after(self) -> None:
        now = self._clock()
        here = {state.peer: state for state in self._view.peers(now) if state.peer != self._own}
        linked = self._links.peers()
        self._choosers = {
            peer: heard for peer, heard in self._choosers.items() if now - heard < FORGET_S and peer in linked
        }
        self._unreached.keep(here)
        for peer, due in list(self._chosen.items()):
            if peer not in here or peer not in linked:
                del self._chosen[peer]
            elif now >= due:
                self._chosen[peer] = now + RENEW_S
                self._send(peer, (self._renew(),))
        missing = CHOSEN - len(self._chosen)
        others = sorted(here.keys() - self._chosen.keys() - self._unreached.paused(now))
        picked = self._rng.sample(others, min(missing, len(others))) if missing > 0 else []
        await asyncio.gather(
            *(self._choose(peer, here[peer].body.addresses, here[peer].body.certificate) for peer in picked)
        )

    async def _choose(self, peer: PeerId, addresses: Sequence[tuple[str, int]], certificate: bytes) -> None:
        try:
            await self._links.ensure(peer, addresses, certificate)
        except LinkError as error:
            self._unreached.failed(peer, self._clock())
            log.debug("neighbour_not_reached", peer=peer[:8], reason=str(error))
            return
        self._unreached.worked(peer)
        self._chosen[peer] = self._clock() + RENEW_S
        self._send(peer, tuple(self._introduce()))

    def _send(self, peer: PeerId, records: tuple[bytes, ...]) -> None:
        try:
            self._links.send(peer, Gossip(records))
        except (FrameError, LinkError) as error:
            log.debug("gossip_not_sent", peer=peer[:8], reason=str(error))
