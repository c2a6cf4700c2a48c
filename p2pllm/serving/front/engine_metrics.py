"""What the layers of this peer do, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from p2pllm.execution import ExecutorStats

__all__ = ["engine_families"]


def engine_families(stats: ExecutorStats) -> Iterator[Metric]:
    """Speed, load and memory of the executor. A peer's processing latency τ (s) for ``n`` layers is
    ``p2pllm_engine_wait_seconds + n * p2pllm_layer_seconds``, and ``p2pllm_head_seconds`` at the model's end.
    """
    totals = stats.totals
    for name, text, value in (
        ("layer_seconds", "Time of a decode step in one layer, of late", stats.layer_s),
        ("head_seconds", "Time of norm, LM head and sampling, of late", stats.head_s),
        ("engine_wait_seconds", "Expected wait for a step, of late", stats.wait_s),
        ("engine_running", "Runs in the present step", stats.running),
        ("engine_waiting", "Runs that wait for a step", stats.waiting),
        ("kv_blocks", "KV blocks of 16 tokens in all layers held here", stats.kv_blocks_total),
        ("kv_blocks_free", "KV blocks that sessions may take", stats.kv_blocks_free),
        ("kv_blocks_cached", "Free KV blocks that keep past sessions", stats.kv_blocks_cached),
        ("kv_used_bytes", "Memory of the KV blocks that sessions have", stats.kv_bytes_used),
        ("weight_bytes", "Memory of the weights", stats.weight_bytes),
    ):
        yield GaugeMetricFamily(f"p2pllm_{name}", text, value=value)
    yield SummaryMetricFamily(
        "p2pllm_step_seconds", "Time of steps", count_value=totals.steps, sum_value=totals.step_s
    )
    yield SummaryMetricFamily(
        "p2pllm_step_wait_seconds",
        "Wait of runs for their first step",
        count_value=totals.runs,
        sum_value=totals.wait_s,
    )
    yield CounterMetricFamily("p2pllm_step_tokens", "Tokens that steps have run", value=totals.tokens)
