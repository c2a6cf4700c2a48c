"""What Phase 1 answers: who holds which layers, and what it found for each number of replicas."""

from __future__ import annotations

from dataclasses import dataclass

from p2pllm.scheduling.phase1.objective import Scores
from p2pllm.scheduling.types import Assignment, Pipeline, Slice

__all__ = ["Candidate", "Plan"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """The best found for k replicas; proven where ``stages`` is ``stages_bound``."""

    k: int
    stages: int
    z: float
    stages_bound: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Who holds which layers. ``z`` is by the goal's objective and no plan exceeds ``z_bound``."""

    k: int
    stages: int
    z: float
    candidates: tuple[Candidate, ...]
    pipelines: tuple[Pipeline, ...]
    spares: tuple[Slice, ...]
    crossings: int
    """Hops between regions on the ring of the one pipeline that crosses them; 0 as a rule."""
    stages_bound: int
    z_bound: float
    scores: Scores
    r_rtt_s: float
    t_comp_s: float
    kept: bool
    """Whether today's pipelines stay because another plan would not pay."""

    @property
    def assignment(self) -> Assignment:
        """Who holds what, to be given as ``today`` the next time."""
        return Assignment(self.pipelines, self.spares)
