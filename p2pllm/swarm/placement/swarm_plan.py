"""The plan of a swarm: which layers a leader gives to whom, cut into records and put together again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from p2pllm.records import PLAN_ENTRIES, PlanBody, PlanEntry
from p2pllm.scheduling import PeerId
from p2pllm.swarm.latency import PREFIX

__all__ = ["Assembler", "PlanKey", "SwarmPlan", "to_bodies"]

PlanKey: TypeAlias = tuple[int, PeerId, int]
"""(epoch, leader, number): of two plans the higher one counts."""

MAX_SIGNERS = 4
"""Whose plans are kept at most: anybody can sign some."""

MAX_DRAFTS = 2
"""Plans of one signer that are kept while parts of them are missing."""


@dataclass(frozen=True, slots=True)
class SwarmPlan:
    """A plan as a leader issued it.

    ``replicas`` (k), ``stages`` and ``score`` (Z) are of the placement behind it, 0 if there was none.
    ``force`` lets peers drop layers that nobody else holds. ``slices`` has at most one entry for each peer,
    pipelines in order as far as they were placed so.
    """

    leader: PeerId
    epoch: int
    number: int
    replicas: int
    stages: int
    score: float
    force: bool
    slices: tuple[PlanEntry, ...]

    @property
    def key(self) -> PlanKey:
        """What plans are ordered by."""
        return self.epoch, self.leader, self.number

    def entry(self, peer: PeerId) -> PlanEntry | None:
        """What the plan gives to a peer."""
        prefix = peer[:PREFIX]
        return next((entry for entry in self.slices if entry.peer == prefix), None)


def to_bodies(plan: SwarmPlan) -> tuple[PlanBody, ...]:
    """The records that a plan takes, part by part; one even if it gives nothing to anybody."""
    parts = range(0, max(1, len(plan.slices)), PLAN_ENTRIES)
    return tuple(
        PlanBody(
            epoch=plan.epoch,
            number=plan.number,
            part=part,
            parts=len(parts),
            replicas=plan.replicas,
            stages=plan.stages,
            score=plan.score,
            force=plan.force,
            entries=plan.slices[start : start + PLAN_ENTRIES],
        )
        for part, start in enumerate(parts)
    )


@dataclass(slots=True)
class _Signer:
    """What has arrived of one leader's plans, by (epoch, number) and part."""

    latest: SwarmPlan | None = None
    drafts: dict[tuple[int, int], dict[int, PlanBody]] = field(default_factory=dict)

    def add(self, leader: PeerId, body: PlanBody) -> bool:
        """Take in a part; True if it is of a plan newer than the latest, and was not here yet."""
        version = body.epoch, body.number
        if self.latest is not None and version <= (self.latest.epoch, self.latest.number):
            return False
        draft = self.drafts.setdefault(version, {})
        if body.part in draft or (draft and not _alike(body, next(iter(draft.values())))):
            return False
        draft[body.part] = body
        if len(draft) == body.parts:
            self.latest = _assembled(leader, draft)
            self.drafts = {other: parts for other, parts in self.drafts.items() if other > version}
        elif len(self.drafts) > MAX_DRAFTS:
            oldest = min(self.drafts)
            del self.drafts[oldest]
            return version != oldest
        return True


class Assembler:
    """Puts plans together from the parts that their signers published."""

    def __init__(self) -> None:
        self._signers: dict[PeerId, _Signer] = {}  # whom we heard last comes last

    def hear(self, signer: PeerId, body: PlanBody, *, leader: PeerId | None = None) -> bool:
        """Take in one verified part; True if it was news, and others are to have it, too.

        When too many sign plans, the one that has been silent longest is forgotten, but never ``leader``.
        """
        self._signers[signer] = known = self._signers.pop(signer, None) or _Signer()
        if len(self._signers) > MAX_SIGNERS:
            del self._signers[next(other for other in self._signers if other not in (leader, signer))]
        return known.add(signer, body)

    def latest(self, signer: PeerId) -> SwarmPlan | None:
        """The newest complete plan of a signer."""
        known = self._signers.get(signer)
        return None if known is None else known.latest


def _alike(one: PlanBody, other: PlanBody) -> bool:
    """Whether two parts can belong to one plan."""
    return (one.parts, one.replicas, one.stages, one.score, one.force) == (
        other.parts,
        other.replicas,
        other.stages,
        other.score,
        other.force,
    )


def _assembled(leader: PeerId, draft: Mapping[int, PlanBody]) -> SwarmPlan:
    first = draft[0]
    entries = {entry.peer: entry for part in sorted(draft) for entry in draft[part].entries}
    return SwarmPlan(
        leader=leader,
        epoch=first.epoch,
        number=first.number,
        replicas=first.replicas,
        stages=first.stages,
        score=first.score,
        force=first.force,
        slices=tuple(entries.values()),
    )
