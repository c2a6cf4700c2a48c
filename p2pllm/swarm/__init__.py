"""What a peer knows of its swarm and what it tells it."""

from p2pllm.swarm.backoff import BackOff
from p2pllm.swarm.latency import UNMEASURED, Latencies, latency_of
from p2pllm.swarm.membership import Membership
from p2pllm.swarm.prober import Prober
from p2pllm.swarm.publisher import Publisher
from p2pllm.swarm.view import GONE_S, PeerState, View

__all__ = [
    "GONE_S",
    "UNMEASURED",
    "BackOff",
    "Latencies",
    "Membership",
    "PeerState",
    "Prober",
    "Publisher",
    "View",
    "latency_of",
]
