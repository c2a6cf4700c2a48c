"""Placement and routing as pure functions: no clock, socket, thread or randomness that is not passed in."""

from p2pllm.scheduling.capacity import Fit, ModelSize, capacity, fit_slice
from p2pllm.scheduling.phase2 import find_chain, uncovered
from p2pllm.scheduling.types import Chain, Holder, PeerId, Rho, Stage
from p2pllm.scheduling.waterfill import fill

__all__ = [
    "Chain",
    "Fit",
    "Holder",
    "ModelSize",
    "PeerId",
    "Rho",
    "Stage",
    "capacity",
    "fill",
    "find_chain",
    "fit_slice",
    "uncovered",
]
