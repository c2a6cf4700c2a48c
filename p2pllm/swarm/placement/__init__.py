"""Who leads the swarm, and who holds which layers.

From claims to an elected leader (`election`), from the view to a plan (`planner`, with `members`, `occasions`
and `placing`), from a plan to records and back (`swarm_plan`), all of it together (`leadership`) and on the
network (`leading`); and what each peer makes of a plan (`allocation`).
"""

from p2pllm.swarm.placement.allocation import Allocation, Drop, Load
from p2pllm.swarm.placement.election import Election
from p2pllm.swarm.placement.leadership import Leadership
from p2pllm.swarm.placement.leading import Leading
from p2pllm.swarm.placement.planner import Planner
from p2pllm.swarm.placement.swarm_plan import SwarmPlan

__all__ = ["Allocation", "Drop", "Election", "Leadership", "Leading", "Load", "Planner", "SwarmPlan"]
