"""Phase 1: which peers hold which layers."""

from p2pllm.scheduling.phase1.exact import EXHAUSTIVE_PEERS, fewest_stages
from p2pllm.scheduling.phase1.objective import Goal, Objective, Scores, Terms
from p2pllm.scheduling.phase1.placement import place
from p2pllm.scheduling.phase1.plan import Candidate, Plan
from p2pllm.scheduling.phase1.waterfill import fill

__all__ = [
    "EXHAUSTIVE_PEERS",
    "Candidate",
    "Goal",
    "Objective",
    "Plan",
    "Scores",
    "Terms",
    "fewest_stages",
    "fill",
    "place",
]
