"""Benchmarks that need no model: of scheduling, and of what a swarm hears of itself."""

from p2pllm.bench.dht_report import bench_dht
from p2pllm.bench.report import bench_scheduling

__all__ = ["bench_dht", "bench_scheduling"]
