"""What `/metrics` says of the engine, read back by Prometheus' own parser."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from p2pllm.execution import ExecutorStats, Totals
from p2pllm.execution.tally import Tally
from p2pllm.serving.front.engine_metrics import engine_families


def test_every_figure_has_its_name() -> None:
    totals = Totals(steps=3, step_s=0.5, tokens=70, runs=5, wait_s=0.25)
    stats = ExecutorStats(0.001, 0.002, 0.003, 4, 5, 60, 50, 40, 7_000, 8_000, totals)

    class Engine:
        def collect(self):  # type: ignore[no-untyped-def]
            return engine_families(stats)

    registry = CollectorRegistry()
    registry.register(Engine())  # type: ignore[arg-type]
    families = text_string_to_metric_families(generate_latest(registry).decode())
    found = {sample.name: sample.value for family in families for sample in family.samples}
    assert found == {
        "p2pllm_layer_seconds": 0.001,
        "p2pllm_head_seconds": 0.002,
        "p2pllm_engine_wait_seconds": 0.003,
        "p2pllm_engine_running": 4,
        "p2pllm_engine_waiting": 5,
        "p2pllm_kv_blocks": 60,
        "p2pllm_kv_blocks_free": 50,
        "p2pllm_kv_blocks_cached": 40,
        "p2pllm_kv_used_bytes": 7_000,
        "p2pllm_weight_bytes": 8_000,
        "p2pllm_step_seconds_count": 3,
        "p2pllm_step_seconds_sum": 0.5,
        "p2pllm_step_wait_seconds_count": 5,
        "p2pllm_step_wait_seconds_sum": 0.25,
        "p2pllm_step_tokens_total": 70,
    }


def test_sums_only_grow() -> None:
    tally = Tally()
    tally.waited(0.25)
    before = tally.totals
    tally.waited(0.5)
    tally.stepped(0.125, 7)
    tally.stepped(0.25, 1)
    assert tally.totals == Totals(steps=2, step_s=0.375, tokens=8, runs=2, wait_s=0.75)
    assert before == Totals(runs=1, wait_s=0.25)
