"""Benchmarks that need neither a swarm nor a model: so far of scheduling."""

from p2pllm.bench.report import bench_scheduling

__all__ = ["bench_scheduling"]
