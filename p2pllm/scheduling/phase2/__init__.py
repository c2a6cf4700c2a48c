"""Phase 2: the chain that a request takes."""

from p2pllm.scheduling.phase2.choices import STALE_S, Choices
from p2pllm.scheduling.phase2.cover import sole_holders, uncovered
from p2pllm.scheduling.phase2.mesh import Mesh
from p2pllm.scheduling.phase2.routes import Routes, find_chain

__all__ = ["STALE_S", "Choices", "Mesh", "Routes", "find_chain", "sole_holders", "uncovered"]
