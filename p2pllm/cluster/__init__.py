"""The cluster file of ``plan``: JSON about a model, peers and their network, and what it comes to."""

from p2pllm.cluster.cluster import Cluster, parse_cluster, read_cluster

__all__ = ["Cluster", "parse_cluster", "read_cluster"]
