"""One peer of a swarm: the composition root, how it runs and ends, and what its operator can tell it."""

from p2pllm.peer.life import run_peer

__all__ = ["run_peer"]
