"""Placement and routing as pure functions: no clock, socket, thread or randomness that is not passed in."""

from p2pllm.scheduling.capacity import Budget, Fit, ModelSize, capacity, fit_slice
from p2pllm.scheduling.choices import STALE_S, Choices
from p2pllm.scheduling.cover import sole_holders, uncovered
from p2pllm.scheduling.exact import fewest_stages
from p2pllm.scheduling.load import coefficient_of_variation, loads, spread, window
from p2pllm.scheduling.membership import (
    Decision,
    Join,
    Member,
    Mend,
    Nothing,
    Replan,
    Rules,
    State,
    decide,
    mend,
)
from p2pllm.scheduling.mesh import Mesh
from p2pllm.scheduling.moves import Moves, safe_moves
from p2pllm.scheduling.network import Network
from p2pllm.scheduling.phase1 import Candidate, Goal, Objective, Plan, Scores, Terms, fill, place
from p2pllm.scheduling.phase2 import Routes, find_chain
from p2pllm.scheduling.regions import derive_regions
from p2pllm.scheduling.roofline import Phase, Request, Roofline
from p2pllm.scheduling.types import (
    Assignment,
    Capacity,
    Chain,
    Holder,
    Offer,
    PeerId,
    Pipeline,
    Rho,
    Slice,
    Stage,
)

__all__ = [
    "STALE_S",
    "Assignment",
    "Budget",
    "Candidate",
    "Capacity",
    "Chain",
    "Choices",
    "Decision",
    "Fit",
    "Goal",
    "Holder",
    "Join",
    "Member",
    "Mend",
    "Mesh",
    "ModelSize",
    "Moves",
    "Network",
    "Nothing",
    "Objective",
    "Offer",
    "PeerId",
    "Phase",
    "Pipeline",
    "Plan",
    "Replan",
    "Request",
    "Rho",
    "Roofline",
    "Routes",
    "Rules",
    "Scores",
    "Slice",
    "Stage",
    "State",
    "Terms",
    "capacity",
    "coefficient_of_variation",
    "decide",
    "derive_regions",
    "fewest_stages",
    "fill",
    "find_chain",
    "fit_slice",
    "loads",
    "mend",
    "place",
    "safe_moves",
    "sole_holders",
    "spread",
    "uncovered",
    "window",
]
