"""Does what the leadership says: publishes this peer's claims and plans, and follows those of others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import structlog

from p2pllm.dht import DhtNode
from p2pllm.errors import P2PLLMError, RecordError
from p2pllm.records import (
    ClaimBody,
    PlanBody,
    Record,
    SwarmBody,
    SwarmKey,
    leader_key,
    plan_key,
    swarms_key,
)
from p2pllm.scheduling import PeerId
from p2pllm.swarm.directory import Directory
from p2pllm.swarm.latency import latency_of
from p2pllm.swarm.membership import Membership
from p2pllm.swarm.placement.leadership import Leadership, Outgoing
from p2pllm.swarm.placement.planner import NewPlan
from p2pllm.swarm.placement.swarm_plan import SwarmPlan
from p2pllm.swarm.publisher import Publisher
from p2pllm.swarm.view import View
from p2pllm.swarm.widths import Widths

__all__ = ["Leading"]

TICK_S: Final = 0.2
"""How often a leader, and whoever may have to be the next one, looks what is to be done."""

CALM_S: Final = 1.0
"""How often all others do; they are told what they must know at once."""

FRESH_S: Final = 1.5
"""Nobody thinks of succession for so long after a claim."""

PATIENCE_S: Final = 2.0
"""How long a newcomer among others looks for a leader before it may stand itself."""

ALONE_S: Final = 0.5
"""The same for one who sees nobody."""

LOOK_S: Final = 0.25
CLAIM_TTL_S: Final = 3.0
PLAN_TTL_S: Final = 30.0
INDEX_TTL_S: Final = 60.0
INDEX_FIRST_S: Final = 0.5
INDEX_S: Final = 20.0
"""How often a leader lists its swarm for others; oftener at first, while few nodes are there to keep it."""

log = structlog.get_logger()


class Leading:
    """One peer's dealings with whoever leads, itself perhaps. ``swarm`` is its 20 bytes."""

    def __init__(
        self,
        *,
        swarm: bytes,
        secret: SwarmKey | None,
        model: SwarmBody,
        dht: DhtNode,
        view: View,
        leadership: Leadership,
        membership: Membership,
        directory: Directory,
        publisher: Publisher,
        widths: Widths,
        on_plan: Callable[[SwarmPlan], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._swarm = swarm
        self._secret = secret
        self._model = model
        self._dht = dht
        self._view = view
        self._leadership = leadership
        self._membership = membership
        self._directory = directory
        self._publisher = publisher
        self._widths = widths
        self._on_plan = on_plan
        self._clock = clock
        self._looked = False  # at who leads and who else is here
        self._wake = asyncio.Event()
        self._fatal: P2PLLMError | None = None
        self._plan: SwarmPlan | None = None
        self._leader: PeerId | None = None
        self._calm_until = 0.0
        self._claimed = -1  # the epoch that this peer claimed last
        self._index_due, self._index_pause = 0.0, INDEX_FIRST_S

    def hear(self, record: Record) -> bool:
        """Take in a verified claim or part of a plan; whether it was news."""
        now = self._clock()
        with suppress(RecordError):
            body = record.body(self._secret)
            if isinstance(body, ClaimBody | PlanBody) and self._leadership.hear(
                record.peer_id, body, record.seq, now
            ):
                if record.peer_id == self._leadership.leader:
                    self._calm_until = now + FRESH_S
                    if isinstance(body, PlanBody) and body.parts > 1:
                        self._directory.plan_changed()
                self._wake.set()
                return True
        return False

    def soon(self) -> None:
        """There may be something to do: a placement is done."""
        self._wake.set()

    def fail(self, error: P2PLLMError) -> None:
        """Have ``run`` raise this: the peer cannot go on."""
        self._fatal = error
        self._wake.set()

    async def look(self) -> None:
        """Know who leads and who is here before this peer has a say.

        In a network where many have just arrived, most nodes do not hold the leader's claim yet.
        """
        await self._membership.arrived.wait()
        await self._directory.read_all()
        began = self._clock()
        while self._dht.contacts() and self._leadership.leader is None:
            if self._clock() - began >= (PATIENCE_S if len(self._view) > 1 else ALONE_S):
                await self._membership.check_model()  # what it would have found may just not have been there
                break
            await asyncio.sleep(LOOK_S)
            await self._directory.read_leader()
        self._looked = True
        self._wake.set()

    async def run(self) -> None:
        """Follow what was heard, and publish what this peer has to say, for ever."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                if self._fatal is not None:
                    raise self._fatal
                self._publish(self.step(), tasks)
                now = self._clock()
                is_calm = now < self._calm_until and not self._leadership.leads(now)
                with suppress(TimeoutError):
                    async with asyncio.timeout(CALM_S if is_calm else TICK_S):
                        await self._wake.wait()
                self._wake.clear()

    def step(self) -> Outgoing:
        """Draw the conclusions from what was heard so far."""
        now = self._clock()
        states = self._view.peers(now)
        outgoing = self._leadership.tick(now, states, lambda: latency_of(states), joined=self._looked)
        self._membership.epoch(self._leadership.epoch)
        if self._leader != (leader := self._leadership.leader):
            self._leader = leader
            log.info("leader", peer=leader[:8] if leader else None, epoch=self._leadership.led_epoch)
            self._directory.plan_changed()
        if leader is not None and self._leadership.bits != self._widths.bits:
            self._widths.follow(self._leadership.bits, now)
            self._directory.look()
            self._publisher.again()
        if (plan := self._leadership.plan) is not None and plan != self._plan:
            self._plan = plan
            log.info("plan", epoch=plan.epoch, leader=plan.leader[:8], number=plan.number)
            self._on_plan(plan)
        return outgoing

    def _publish(self, outgoing: Outgoing, tasks: asyncio.TaskGroup) -> None:
        now = self._clock()
        if outgoing.news is not None:
            _tell(outgoing.news)
        if outgoing.claim is not None:
            tasks.create_task(self._claim(outgoing.claim))
        is_new = outgoing.news is not None and outgoing.news.plan is not None
        for body in outgoing.plans:
            key = plan_key(self._swarm, body.part)
            tasks.create_task(self._publisher.publish(body, key, PLAN_TTL_S, flood=is_new))
        if self._leadership.leads(now) and now >= self._index_due:
            self._index_due = now + self._index_pause
            self._index_pause = min(2 * self._index_pause, INDEX_S)
            tasks.create_task(self._publisher.publish(self._model, swarms_key(self._swarm), INDEX_TTL_S))

    async def _claim(self, claim: ClaimBody) -> None:
        began = self._clock()
        is_first = claim.epoch != self._claimed
        self._claimed = claim.epoch
        # Of two that hold it one is another peer.
        key = leader_key(self._swarm)
        if await self._publisher.publish(claim, key, CLAIM_TTL_S, flood=is_first) >= 2:
            self._leadership.published(began)
            self._wake.set()


def _tell(news: NewPlan) -> None:
    if news.problem:
        log.warning("cannot_place", reason=news.reason, problem=news.problem)
    if news.plan is not None:
        log.info("planned", reason=news.reason, number=news.plan.number, replicas=news.plan.replicas)
