"""What a peer knows of its swarm and what it tells it: who is there, who leads, and what everybody holds."""

from p2pllm.swarm.backoff import BackOff
from p2pllm.swarm.latency import PREFIX, UNMEASURED, Latencies, latency_of
from p2pllm.swarm.placement import Allocation, Drop, Load, SwarmPlan
from p2pllm.swarm.prober import Prober
from p2pllm.swarm.swarm import Swarm
from p2pllm.swarm.view import GONE_S, PeerState, View

__all__ = [
    "GONE_S",
    "PREFIX",
    "UNMEASURED",
    "Allocation",
    "BackOff",
    "Drop",
    "Latencies",
    "Load",
    "PeerState",
    "Prober",
    "Swarm",
    "SwarmPlan",
    "View",
    "latency_of",
]
