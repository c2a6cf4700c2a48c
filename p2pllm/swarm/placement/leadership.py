"""Who leads the swarm, which plan counts, and what this peer publishes about both.

Pure: records and times go in, bodies to publish come out. Everything here is advice: each peer decides by
itself whether a plan is for it, and routing looks only at what peers say of themselves, so two leaders in a
split network do no harm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from p2pllm.records import MAX_EPOCH, ClaimBody, PlanBody
from p2pllm.scheduling import Network, PeerId, Rules
from p2pllm.swarm.placement.election import Election
from p2pllm.swarm.placement.placing import Facts, Place, place_now
from p2pllm.swarm.placement.planner import NewPlan, Planner
from p2pllm.swarm.placement.swarm_plan import Assembler, SwarmPlan, to_bodies
from p2pllm.swarm.view import PeerState
from p2pllm.swarm.widths import bits_for

__all__ = ["Leadership", "Outgoing"]

PLAN_S = 0.5
"""How often a leader looks whether something is to be done; oftener while nobody is served."""

REFRESH_S = 10.0
"""How often it publishes its plan again."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What to publish now: ``claim`` under the leader key, part i of ``plans`` under the i-th plan key.

    ``news`` says why there is a new plan, or why there is none, once, for the log.
    """

    claim: ClaimBody | None = None
    plans: tuple[PlanBody, ...] = ()
    news: NewPlan | None = None


class Leadership:
    """The part of one peer in leading its swarm.

    ``epoch`` grows with every leader; the caller keeps it on disk and gives the last one back at the start.
    """

    def __init__(
        self,
        own: PeerId,
        layers: int,
        *,
        epoch: int = 0,
        rules: Rules | None = None,
        place: Place = place_now,
    ) -> None:
        self._own = own
        self._layers = layers
        self._rules = rules
        self._place = place
        self._bits = 0
        self._election = Election(own, epoch)
        self._assembler = Assembler()
        self._plan: SwarmPlan | None = None
        self._number = 0  # the highest that this peer has given to a plan
        self._planner: Planner | None = None
        self._looked_s = self._published_s = -math.inf

    def hear(self, peer: PeerId, body: ClaimBody | PlanBody, seq: int, now: float) -> bool:
        """Take in what a verified record of ``peer`` says; True if it is news.

        One's own records count too, when they come back: a peer that restarted learns from them what it had
        said.
        """
        if isinstance(body, ClaimBody):
            return self._election.hear(peer, body, seq, now)
        if peer == self._own:
            self._number = max(self._number, body.number)
            return False
        return self._assembler.hear(peer, body, leader=self.leader)

    def tick(
        self, now: float, states: Sequence[PeerState], network: Callable[[], Network], *, joined: bool
    ) -> Outgoing:
        """Return what to publish now; to be called some ten times a second.

        ``states`` are the live peers of the view: this one must be among them, or it cannot lead. ``network``
        is asked only when peers are to be placed. ``joined`` says that the leader's key and the directory
        have been read, or that there is nobody to read them from.
        """
        eligible = {state.peer for state in states if not state.body.leaving}
        epoch = self._election.tick(now, eligible, joined=joined)
        leads = self._election.leads(now)
        if leads:
            self._bits = bits_for(len(states), self._bits)
        elif self._election.claim is not None:
            self._bits = self._election.claim.bits
        self._follow()
        claim = None if epoch is None else ClaimBody(epoch, self._bits)
        if not leads:
            self._planner = None
            return Outgoing(claim)
        news = self._decided(now, states, network)
        plan = self._due(now, news)
        return Outgoing(claim, () if plan is None else to_bodies(plan), news)

    def published(self, now: float) -> None:
        """A claim that this peer made at ``now`` has been stored by another: it may go on leading."""
        self._election.published(now)

    def leads(self, now: float) -> bool:
        """Whether this peer may issue plans."""
        return self._election.leads(now)

    def leaderless_s(self, now: float) -> float:
        """How long nobody has led (0: somebody does), for ``Allocation.step``."""
        return self._election.leaderless_s(now)

    @property
    def leader(self) -> PeerId | None:
        """Who led at the last tick."""
        return self._election.leader

    @property
    def led_epoch(self) -> int:
        """The epoch of whoever led at the last tick; the highest of all if nobody did."""
        claim = self._election.claim
        return self.epoch if claim is None else claim.epoch

    @property
    def epoch(self) -> int:
        """The highest epoch that a member has claimed: to be kept on disk."""
        return self._election.epoch

    @property
    def plan(self) -> SwarmPlan | None:
        """The plan that counts, to be handed to ``Allocation.follow`` whenever it changes."""
        return self._plan

    @property
    def bits(self) -> int:
        """Into how many bits the leader cuts the directory."""
        return self._bits

    @property
    def facts(self) -> Facts | None:
        """What this peer made its last placement from, if it is leading and made any."""
        return None if self._planner is None else self._planner.facts

    def _follow(self) -> None:
        """Take over what another leader issued.

        Plans count only if their signer led in our eyes, and in no later epoch than it had claimed: so
        whoever leads next comes after all plans that were ever followed. Only when epochs have come to their
        end do they no longer tell what is newer, and whoever leads is believed.
        """
        claim = self._election.claim
        plan = None if self.leader is None else self._assembler.latest(self.leader)
        if claim is None or plan is None or plan.epoch > claim.epoch:
            return
        if self._plan is None or plan.key > self._plan.key or plan.epoch == MAX_EPOCH:
            self._plan = plan

    def _decided(
        self, now: float, states: Sequence[PeerState], network: Callable[[], Network]
    ) -> NewPlan | None:
        """What there is to do for a leader, who looks now and then."""
        epoch = self._election.standing
        if epoch is None:
            return None
        if self._planner is None:
            self._planner = Planner(
                self._own,
                self._layers,
                epoch,
                number=self._number,
                rules=self._rules,
                place=self._place,
            )
        elif now - self._looked_s < PLAN_S and not self._planner.waits:
            return None
        self._looked_s = now
        news = self._planner.plan(now, states, network, self._plan)
        if news is not None and news.plan is not None:
            self._plan, self._number = news.plan, news.plan.number
        return news

    def _due(self, now: float, news: NewPlan | None) -> SwarmPlan | None:
        """The plan to publish now: a new one, or one's own again, whose records get old."""
        plan = self._plan if news is None or news.plan is None else news.plan
        if plan is None or (plan.leader, plan.epoch) != (self._own, self._election.standing):
            return None
        if (news is None or news.plan is None) and now - self._published_s < REFRESH_S:
            return None
        self._published_s = now
        return plan
