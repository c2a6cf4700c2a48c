"""What a leader decides: plans that follow the view, and go no further than they must.

Pure: the view, the time and the plan so far go in; a new plan comes out when there is a reason for one. What
to do and when is decided by ``scheduling``, the same functions that the ``plan`` command runs on a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from p2pllm.errors import ModelError
from p2pllm.scheduling import (
    Decision,
    Join,
    Mend,
    Network,
    Nothing,
    Offer,
    PeerId,
    Replan,
    Rules,
    Slice,
    State,
    decide,
    mend,
)
from p2pllm.swarm.latency import PREFIX
from p2pllm.swarm.placement.members import Roster, assignment_of
from p2pllm.swarm.placement.occasions import Arrivals, Requests
from p2pllm.swarm.placement.placing import Facts, Place, Question, place_now
from p2pllm.swarm.placement.swarm_plan import SwarmPlan
from p2pllm.swarm.view import PeerState

__all__ = ["NewPlan", "Planner", "Reason"]

Reason: TypeAlias = Literal["joined", "mended", "renewed", "requested", "unbalanced", "uncovered"]

RENEW_S = 2.0
"""The least time between two issues of the same slices."""

ADOPT_S = 10.0
"""When a new leader issues its predecessor's plan in its own name, if there was no reason for another."""


@dataclass(frozen=True, slots=True)
class NewPlan:
    """What a leader decided and why. ``plan`` is None when there is nothing that it could give to anybody.

    ``problem`` says why peers cannot be placed, and how many layers are missing: once, until that changes.
    """

    plan: SwarmPlan | None
    reason: Reason
    problem: str = ""


@dataclass(frozen=True, slots=True)
class _Draft:
    """What a plan is to say, and of which placement it is, if of any."""

    slices: tuple[Slice, ...]
    replicas: int = 0
    stages: int = 0
    score: float = 0.0


@dataclass(slots=True)
class _Placement:
    """One that is being made: why, and what to go back to if there is none."""

    reason: Reason
    before: State
    question: Question | None = None


class Planner:
    """What the leader of one epoch decides, tick by tick."""

    def __init__(
        self,
        own: PeerId,
        layers: int,
        epoch: int,
        *,
        number: int = 0,
        rules: Rules | None = None,
        place: Place = place_now,
    ) -> None:
        """``number`` is the highest that ``own`` has given to a plan. Until ``place`` has an answer there is
        no other plan.
        """
        self._own = own
        self._layers = layers
        self._epoch = epoch
        self.facts: Facts | None = None
        """Of the last placement; None before the first one."""
        self._number = number
        self._rules = rules or Rules()
        self._place = place
        self._placement: _Placement | None = None
        self._state: State | None = None
        self._began_s, self._issued_s = math.inf, -math.inf
        self._arrivals = Arrivals()
        self._requests = Requests()
        self._hopeless: tuple[tuple[Offer, ...], str] | None = None  # who cannot be placed, and why
        self._problem = ""

    @property
    def waits(self) -> bool:
        """Whether more peers may be about to arrive, or a placement to be done: to be asked again soon."""
        return self._arrivals.waits or self._placement is not None

    def plan(
        self,
        now: float,
        states: Sequence[PeerState],
        network: Callable[[], Network],
        current: SwarmPlan | None,
    ) -> NewPlan | None:
        """Return a new plan if there is a reason for one, given the live peers and the plan that counts.

        ``network`` is asked only for a placement.
        """
        roster = Roster.of(self._layers, states)
        self._requests.note(states)
        if self._arrivals.settling(now, roster) and self._placement is None:
            return None
        self._began_s = min(self._began_s, now)
        slices = roster.planned(current.slices) if current is not None else ()
        reason, draft, problem = self._decided(now, roster, slices, current, network)
        if self._placement is not None:
            return None
        if draft is None and current is not None and self._fades(now, roster, slices, current):
            reason, draft = "renewed", _extended(current, slices, ())
        is_news, self._problem = problem not in ("", self._problem), problem
        if draft is None:
            return NewPlan(None, reason, problem) if is_news else None
        # Where nobody is served nobody can be interrupted. Who was allowed to go on is allowed to finish.
        force = not roster.serves or (reason == "requested" and self._requests.force)
        force |= current is not None and current.force and not all(roster.holds(p, "ready") for p in slices)
        return NewPlan(self._issued(now, roster, draft, force=force), reason, problem if is_news else "")

    def _first_state(self, now: float, roster: Roster, current: SwarmPlan | None) -> State:
        """What a leader starts with.

        One that takes over may place everybody as soon as a layer has no holder, but cannot know for how long
        loads have been uneven, so for that it waits as long as after a placement of its own.
        """
        if current is None and not any(member.ready or member.loading for member in roster.members):
            return State()
        interval = self._rules.min_interval_s
        return State(now - interval, wait_s=2 * interval, left=None)

    def _decided(
        self,
        now: float,
        roster: Roster,
        slices: tuple[Slice, ...],
        current: SwarmPlan | None,
        network: Callable[[], Network],
    ) -> tuple[Reason, _Draft | None, str]:
        """Why and what to plan, if anything, and why peers cannot be placed, if they cannot."""
        decision: Decision = Nothing()
        reason: Reason = "renewed"
        problem = ""
        if self._placement is None:
            before = self._state or self._first_state(now, roster, current)
            requested = self._requests.due(now)
            decision, self._state = decide(
                self._layers, roster.members, slices, before, now, rules=self._rules, requested=requested
            )
            if isinstance(decision, Replan):
                self._placement = _Placement(decision.reason, before)
        if (placement := self._placement) is not None:
            reason = placement.reason
            try:
                draft = self._placed(placement, roster, slices, network)
            except ModelError as error:
                problem = str(error)
            else:
                if draft is None:
                    return reason, None, ""
                self._placement = None
                stays = set(draft.slices) == set(slices) and reason != "requested"
                return reason, None if stays else draft, ""
            self._placement = None
            # Nobody was placed, so a peer that is lacking need not wait for the next placement. But loads
            # that are uneven because of pinned peers stay so, and are not looked at again so soon.
            if reason != "unbalanced":
                self._state = placement.before
            decision = mend(self._layers, roster.members, slices)
        if isinstance(decision, Join):
            return "joined", _extended(current, slices, decision.slices), problem
        if isinstance(decision, Mend):
            moved = {piece.peer for piece in decision.slices}
            staying = tuple(piece for piece in slices if piece.peer not in moved)
            return "mended", _Draft(staying + decision.slices), problem
        return reason, None, problem

    def _placed(
        self,
        placement: _Placement,
        roster: Roster,
        slices: Sequence[Slice],
        network: Callable[[], Network],
    ) -> _Draft | None:
        """Phase 1 for all that may be placed; None as long as it is being made.

        Who has gone meanwhile is left out, and what that leaves open is mended. Raises ModelError if they
        cannot hold the model.
        """
        if placement.question is None:
            placement.question = self._question(roster, slices, network)
        try:
            plan = self._place(placement.question)
        except ModelError as error:
            self._hopeless = placement.question.offers, str(error)
            raise
        if plan is None:
            return None
        self.facts = placement.question.facts
        placed = plan.assignment.slices
        kept = roster.holdable(placed)
        return _Draft(placed, plan.k, plan.stages, plan.z) if len(kept) == len(placed) else _Draft(kept)

    def _question(self, roster: Roster, slices: Sequence[Slice], network: Callable[[], Network]) -> Question:
        """What to place. Raises ModelError if it is known that there is no answer."""
        offers = roster.offers
        if not offers:
            raise ModelError("all peers have chosen their layers: start one without --layers")
        if self._hopeless is not None and self._hopeless[0] == offers:
            raise ModelError(self._hopeless[1])
        regions = {offer.peer: offer.region for offer in offers}
        today = assignment_of(self._layers, [*slices, *roster.unplanned(slices)], regions)
        return Question(self._layers, offers, Facts(tuple(roster.states.values()), network(), today))

    def _fades(self, now: float, roster: Roster, slices: Sequence[Slice], current: SwarmPlan) -> bool:
        """Whether a plan is to be issued again as it is: its leader is gone and its records with it, or a
        peer did not follow because it has come into another generation since, by a restart or a failure.
        """
        if now - self._issued_s < RENEW_S:
            return False
        if (current.leader, current.epoch) != (self._own, self._epoch) and now - self._began_s >= ADOPT_S:
            return True
        generations = {entry.peer: entry.generation for entry in current.slices}
        return any(
            generations[piece.peer[:PREFIX]] != roster.generation(piece.peer)
            and not roster.holds(piece, "ready", "loading")
            and not roster.moves(piece.peer)
            for piece in slices
        )

    def _issued(self, now: float, roster: Roster, draft: _Draft, *, force: bool) -> SwarmPlan:
        """A draft as the next plan of this leader."""
        self._number += 1
        self._issued_s = now
        return SwarmPlan(
            leader=self._own,
            epoch=self._epoch,
            number=self._number,
            replicas=draft.replicas,
            stages=draft.stages,
            score=draft.score,
            force=force,
            slices=roster.entries(draft.slices),
        )


def _extended(current: SwarmPlan | None, slices: tuple[Slice, ...], joined: tuple[Slice, ...]) -> _Draft:
    """The slices of a plan and more: still of the same placement if everybody whom it placed is there."""
    if current is None or len(slices) < len(current.slices):
        return _Draft(slices + joined)
    return _Draft(slices + joined, current.replicas, current.stages, current.score)
