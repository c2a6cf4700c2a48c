"""One peer's part in its swarm: what it hears goes to the view and the leadership, what they say goes out.

No model is needed for it: `bench dht` and tests run dozens of these in one process.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import structlog

from p2pllm.config import Address
from p2pllm.dht import DhtNode, Digest, Held
from p2pllm.errors import P2PLLMError
from p2pllm.identity import Identity
from p2pllm.records import MetricsBody, PeerBody, Record, SwarmBody, SwarmKey
from p2pllm.scheduling import PeerId
from p2pllm.swarm.directory import Directory
from p2pllm.swarm.gossip import Gossiper
from p2pllm.swarm.membership import Membership, Memory
from p2pllm.swarm.placement.leadership import Leadership
from p2pllm.swarm.placement.leading import Leading
from p2pllm.swarm.placement.placing import Placing
from p2pllm.swarm.placement.swarm_plan import SwarmPlan
from p2pllm.swarm.prober import Prober
from p2pllm.swarm.publisher import Publisher
from p2pllm.swarm.view import View
from p2pllm.swarm.widths import Widths
from p2pllm.transport import Gossip, Links

__all__ = ["Swarm"]

WATCH_S: Final = 0.25
RESTLESS_S: Final = 3.0
"""For so long after some have come or gone the directory is read in full, also while idle."""
PROBE_S: Final = 4.0
IDLE_PROBE_S: Final = 10.0
SERVING_S: Final = 10.0

log = structlog.get_logger()


class Swarm:
    """Keeps ``view`` and ``leadership`` up to date, and the swarm informed. Owner of all that takes.

    ``id`` is the 20 bytes that name the swarm, ``own`` this peer.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        swarm: bytes,
        secret: SwarmKey | None,
        dht: DhtNode,
        links: Links,
        model: SwarmBody,
        bootstrap: Sequence[Address],
        new_swarm: bool,
        prober: Prober,
        describe: Callable[[], PeerBody],
        measure: Callable[[], MetricsBody],
        on_plan: Callable[[SwarmPlan], None],
        remembered: Memory,
        on_news: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        """``describe`` and ``measure`` say what is to be published; ``on_plan`` gets each plan that counts,
        and ``on_news`` is called when there may be something new in the view.
        """
        self.id = swarm
        self.own: PeerId = identity.peer_id
        self.view = View(swarm, secret)
        self.leadership = Leadership(
            self.own,
            model.layers,
            epoch=remembered.epoch,
            place=Placing(self._placed),
        )
        self._dht = dht
        self._model = model
        self._prober = prober
        self._on_news = on_news
        self._clock = clock
        self._rng = rng = rng or random.Random()
        self._widths = Widths()
        self._publisher = Publisher(
            identity=identity,
            swarm=swarm,
            secret=secret,
            dht=dht,
            keys=self._own_keys,
            describe=describe,
            measure=measure,
            keep=self._keep,
            flood=self._tell,
            stored=remembered.seq,
            rng=rng,
            clock=clock,
        )
        self._directory = Directory(
            identity=identity,
            swarm=swarm,
            secret=secret,
            dht=dht,
            widths=self._widths,
            hear=self._hear,
            hint=self._hint,
            alone=lambda: len(self.view) < 2 and self.leadership.leader is None,
            leader=lambda: self.leadership.leader,
            rng=rng,
            clock=clock,
        )
        self._gossiper = Gossiper(
            own=self.own,
            swarm=swarm,
            links=links,
            view=self.view,
            open_checked=dht.open,  # which remembers what it has checked, whichever way it came first
            accept=self._take,
            introduce=self._publisher.introduction,
            renew=lambda: self._publisher.flooded,
            rng=rng,
            clock=clock,
        )
        self._membership = Membership(
            identity=identity,
            dht=dht,
            swarm=swarm,
            secret=secret,
            model=model,
            bootstrap=bootstrap,
            new_swarm=new_swarm,
            memory=remembered,
            seq=lambda: self._publisher.seq,
            rng=rng,
            others=self._addresses,
        )
        self._leading = Leading(
            swarm=swarm,
            secret=secret,
            model=model,
            dht=dht,
            view=self.view,
            leadership=self.leadership,
            membership=self._membership,
            directory=self._directory,
            publisher=self._publisher,
            widths=self._widths,
            on_plan=on_plan,
            clock=clock,
        )
        self._serving_until = 0.0

    @property
    def contacts(self) -> int:
        """How many nodes of the DHT this peer knows."""
        return len(self._dht.contacts())

    def soon(self) -> None:
        """Something that others care about has changed here: tell them within a moment."""
        self._publisher.soon()

    def serving(self) -> None:
        """Somebody needs fresh news, now and for the next ten seconds."""
        self._serving_until = self._clock() + SERVING_S
        self._directory.serving()

    def receive(self, sender: PeerId, message: Gossip) -> None:
        """Take in what came over a link. Never raises."""
        self._gossiper.receive(sender, message)
        self._on_news()

    def link_down(self, peer: PeerId) -> None:
        """The link to a peer is gone."""
        self._gossiper.link_down(peer)

    async def other_models(self) -> list[str]:
        """The names of the models that other swarms of the network serve."""
        return await self._membership.other_models()

    async def run(self) -> None:
        """Join and take part, until cancelled.

        Raises, alone or in an ExceptionGroup: ModelError when the network that answered serves other models
        only, P2PLLMError when another process uses the same identity.
        """
        await self._membership.join()
        await self._directory.read_leader()
        self._leading.step()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._publisher.run())
            tasks.create_task(self._leading.run())
            tasks.create_task(self._leading.look())
            tasks.create_task(self._directory.run())
            tasks.create_task(self._gossiper.run())
            tasks.create_task(self._membership.stay())
            tasks.create_task(self._membership.remember())
            tasks.create_task(self._watch())
            await self._probe()

    async def goodbye(self) -> None:
        """Tell the others that this peer is gone. ``run`` must have ended."""
        raws = self._publisher.goodbye()
        self._gossiper.pass_on_now()
        await asyncio.gather(self._publisher.put(*raws), self._membership.save())

    # What comes in

    def _hear(self, found: Sequence[Held]) -> None:
        for record, life in found:
            self._take(record, life)
        self._on_news()

    def _hint(self, digests: Sequence[Digest]) -> bool:
        now = self._clock()
        is_worth_reading = [self.view.hint(digest, now) for digest in digests if digest.peer_id != self.own]
        self._on_news()
        return any(is_worth_reading)

    def _take(self, record: Record, life: float | None = None) -> bool:
        """Take in a verified record with ``life`` seconds left; whether it was news."""
        life = record.ttl if life is None else life
        if record.swarm != self.id:
            return False
        if record.peer_id == self.own:
            try:
                self._publisher.seen(record, life)
            except P2PLLMError as error:
                self._leading.fail(error)
        if record.kind in ("claim", "plan"):
            return self._leading.hear(record)
        return record.peer_id != self.own and self._take_member(record, life)

    def _take_member(self, record: Record, life: float) -> bool:
        now = self._clock()
        if not self.view.is_newer(record.peer_id, record.kind, record.seq):
            return False  # as most are: what is read of a shard is all of it
        before = self.view.peer(record.peer_id, now)
        if not self.view.apply(record, now, life=life):
            return False
        after = self.view.peer(record.peer_id, now)
        if after is not None and (before is None or before.body.addresses != after.body.addresses):
            self._dht.moved(bytes.fromhex(record.peer_id), after.body.addresses)
        return True

    def _placed(self) -> None:
        self._leading.soon()

    # What goes out

    def _own_keys(self) -> Sequence[bytes]:
        return self._directory.own_keys()

    def _keep(self, record: Record) -> None:
        self.view.apply(record, self._clock())

    def _tell(self, raw: bytes) -> None:
        self._gossiper.tell(raw)

    def _addresses(self) -> Iterator[Address]:
        for state in self.view.peers(self._clock()):
            if state.peer != self.own:
                yield from state.body.addresses

    async def _watch(self) -> None:
        """Notice who falls silent, and tell the log who comes and goes."""
        restless_until = float("-inf")
        while True:
            arrived, gone = self.view.changes(self._clock())
            for peer in arrived - {self.own}:
                log.info("peer_arrived", peer=peer[:8])
            for peer in gone - {self.own}:
                log.info("peer_gone", peer=peer[:8])
            if arrived or gone:
                restless_until = self._clock() + RESTLESS_S
            if self._clock() < restless_until:
                self._directory.doubt()
            if gone:
                self._on_news()
            await asyncio.sleep(WATCH_S)

    async def _probe(self) -> None:
        await asyncio.sleep(self._rng.uniform(0.25, 1) * PROBE_S)
        while True:
            await self._prober.probe(self.own, self.view.peers(self._clock()), self._model.layers)
            is_serving = self._clock() < self._serving_until
            await asyncio.sleep((PROBE_S if is_serving else IDLE_PROBE_S) * self._rng.uniform(0.9, 1.1))
