"""What the entry's queue does, for Prometheus and for ``status``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from p2pllm.execution import ExecutorStats
from p2pllm.serving.entry import Generator
from p2pllm.serving.front.engine_metrics import engine_families
from p2pllm.serving.front.gate import Gate

__all__ = ["METRICS_TYPE", "admission_json", "metrics_text"]

METRICS_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
"""The content type of ``metrics_text``."""


def admission_json(gate: Gate) -> dict[str, Any]:
    """How many requests wait and run, how many may run, how long the oldest has waited (s), how many were
    ever started and waited how long in all (s), and how many got nothing, by reason.
    """
    admission = gate.admission
    return {
        "waiting": admission.waiting,
        "running": admission.running,
        "limit": admission.limit.value,
        "oldest_s": round(admission.oldest_s(gate.clock()), 3),
        "started": admission.started,
        "waited_s": round(admission.waited_s, 3),
        "refused": dict(admission.refused),
    }


def metrics_text(gate: Gate, sessions: Generator | None, stats: ExecutorStats | None) -> bytes:
    """The same in Prometheus' text format, with what became of the ``sessions`` and what this peer's layers
    do.
    """
    registry = CollectorRegistry(auto_describe=False)
    entry = () if sessions is None else _session_families(sessions)
    engine = () if stats is None else engine_families(stats)
    registry.register(_Families([*_families(admission_json(gate)), *entry, *engine]))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _families(figures: dict[str, Any]) -> Iterator[Metric]:
    for name, text, value in (
        ("requests_waiting", "Requests that wait for their turn", figures["waiting"]),
        ("requests_running", "Requests that have a chain or look for one", figures["running"]),
        ("requests_limit", "Requests that may run at once", figures["limit"]),
        (
            "oldest_wait_seconds",
            "How long the request has waited that has waited longest",
            figures["oldest_s"],
        ),
    ):
        yield GaugeMetricFamily(f"p2pllm_{name}", text, value=value)
    yield SummaryMetricFamily(
        "p2pllm_wait_seconds",
        "Wait of the requests that got a chain",
        count_value=figures["started"],
        sum_value=figures["waited_s"],
    )
    refused = CounterMetricFamily(
        "p2pllm_requests_refused", "Requests that got no chain, by reason", labels=["reason"]
    )
    for reason, count in figures["refused"].items():
        refused.add_metric([reason], count)
    yield refused


def _session_families(sessions: Generator) -> Iterator[Metric]:
    for name, text, value in (
        ("prompt_tokens", "Tokens of prompts that got a chain", sessions.prompt_tokens),
        ("prompt_tokens_cached", "Those of them that all stages had kept", sessions.cached_tokens),
        ("reroutes", "How often sessions went on on another chain", sessions.reroutes),
        (
            "recomputed_layer_tokens",
            "What that made stages compute once more, tokens times layers",
            sessions.recomputed_layer_tokens,
        ),
    ):
        yield CounterMetricFamily(f"p2pllm_{name}", text, value=value)
