"""What records say: one frozen dataclass for each kind, packed as a flat list in field order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self, TypeAlias

from p2pllm.records.fields import Fields
from p2pllm.records.leader_bodies import ClaimBody, PlanBody
from p2pllm.records.limits import MAX_LAYERS, Kind
from p2pllm.records.member_bodies import MetricsBody, PeerBody

__all__ = ["BODIES", "CODES", "Body", "SwarmBody"]


@dataclass(frozen=True, slots=True)
class SwarmBody:
    """An entry of the index of swarms: the model that a swarm serves and how many layers it has."""

    kind: ClassVar[Kind] = "swarm"

    model: str
    fingerprint: str
    layers: int

    def pack(self) -> list[object]:
        """The body as it travels: one flat list in field order."""
        return [self.model, self.fingerprint, self.layers]

    @classmethod
    def parse(cls, packed: object) -> Self:
        """The inverse of ``pack``, for what a stranger sent; RecordError if a field is out of its limits."""
        fields = Fields(packed, 3)
        return cls(model=fields.text(128), fingerprint=fields.text(128), layers=fields.count(MAX_LAYERS))


Body: TypeAlias = PeerBody | MetricsBody | ClaimBody | PlanBody | SwarmBody

BODIES: dict[int, type[Body]] = {1: PeerBody, 2: MetricsBody, 3: ClaimBody, 4: PlanBody, 5: SwarmBody}
CODES: dict[Kind, int] = {body.kind: code for code, body in BODIES.items()}
