"""What those say who lead a swarm, or want to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Self

from p2pllm.errors import RecordError
from p2pllm.records.fields import MAX_NUMBER, Fields
from p2pllm.records.keys import MAX_DIRECTORY_BITS, MAX_PLAN_PARTS
from p2pllm.records.limits import MAX_EPOCH, MAX_GENERATION, MAX_LAYERS, Kind

__all__ = ["PLAN_ENTRIES", "ClaimBody", "PlanBody", "PlanEntry"]

PLAN_ENTRIES: Final = 32
"""What one part of a plan has room for, whatever it says and also when it is sealed."""


@dataclass(frozen=True, slots=True)
class ClaimBody:
    """Who leads, or wants to: the highest (epoch, peer id) does. ``bits`` cut the directory into shards."""

    kind: ClassVar[Kind] = "claim"

    epoch: int
    bits: int

    def pack(self) -> list[object]:
        """The body as it travels: one flat list in field order."""
        return [self.epoch, self.bits]

    @classmethod
    def parse(cls, packed: object) -> Self:
        """The inverse of ``pack``, for what a stranger sent; RecordError if a field is out of its limits."""
        fields = Fields(packed, 2)
        return cls(epoch=fields.count(MAX_EPOCH), bits=fields.count(MAX_DIRECTORY_BITS))


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """What a plan gives one peer, named by the first 16 hexadecimal digits of its id: layers ``[start,
    end)``.

    Only for a peer that is still in the allocation ``generation`` which the leader saw.
    """

    peer: str
    start: int
    end: int
    generation: int


@dataclass(frozen=True, slots=True)
class PlanBody:
    """Part ``part`` of ``parts`` of plan ``number`` of the leader of ``epoch``.

    ``replicas`` is k and ``stages`` how many they take together, both 0 if the plan did not come from a
    placement; ``score`` is Z(k). ``force`` lets peers drop layers before others hold them.
    """

    kind: ClassVar[Kind] = "plan"

    epoch: int
    number: int
    part: int
    parts: int
    replicas: int
    stages: int
    score: float
    force: bool
    entries: tuple[PlanEntry, ...]

    def pack(self) -> list[object]:
        """The body as it travels: one flat list in field order."""
        return [
            self.epoch,
            self.number,
            self.part,
            self.parts,
            self.replicas,
            self.stages,
            float(self.score),
            self.force,
            [[bytes.fromhex(e.peer), e.start, e.end, e.generation] for e in self.entries],
        ]

    @classmethod
    def parse(cls, packed: object) -> Self:
        """The inverse of ``pack``, for what a stranger sent; RecordError if a field is out of its limits."""
        fields = Fields(packed, 9)
        epoch, number = fields.count(MAX_EPOCH), fields.count()
        part, parts = fields.count(MAX_PLAN_PARTS), fields.count(MAX_PLAN_PARTS)
        if part >= parts:
            raise RecordError(f"a record is part {part} of {parts}")
        return cls(
            epoch=epoch,
            number=number,
            part=part,
            parts=parts,
            replicas=fields.count(MAX_LAYERS),
            stages=fields.count(),
            score=fields.number(lowest=-MAX_NUMBER),
            force=fields.flag(),
            entries=tuple(_plan_entry(item) for item in fields.items(PLAN_ENTRIES)),
        )


def _plan_entry(packed: object) -> PlanEntry:
    fields = Fields(packed, 4)
    peer, start, end = fields.octets(8).hex(), fields.count(MAX_LAYERS), fields.count(MAX_LAYERS)
    if start >= end:
        raise RecordError(f"a record plans the empty slice {start}:{end}")
    return PlanEntry(peer, start, end, fields.count(MAX_GENERATION))
