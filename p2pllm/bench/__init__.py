"""Benchmarks: of scheduling, of what a swarm hears of itself, of the engine beside transformers, and of
recovery.
"""

from p2pllm.bench.decode_report import bench_decode
from p2pllm.bench.dht_report import bench_dht
from p2pllm.bench.recovery_report import bench_recovery
from p2pllm.bench.report import bench_scheduling
from p2pllm.bench.throughput_report import bench_throughput

__all__ = ["bench_decode", "bench_dht", "bench_recovery", "bench_scheduling", "bench_throughput"]
