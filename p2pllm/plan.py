"""``p2pllm plan``: both phases of scheduling for a swarm that exists only in a file."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from p2pllm.cluster import Cluster, read_cluster
from p2pllm.errors import NoRouteError
from p2pllm.scheduling import (
    EXHAUSTIVE_PEERS,
    Chain,
    Plan,
    Slice,
    Stage,
    Terms,
    fewest_stages,
    find_chain,
    place,
)

__all__ = ["Certificate", "Outcome", "certify", "make_plan", "outcome_json", "print_outcome", "show_plan"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What both phases say and how long each took (ms); ``no_chain`` tells why there is no chain."""

    plan: Plan
    chain: Chain | None
    no_chain: str
    phase1_ms: float
    phase2_ms: float


@dataclass(frozen=True, slots=True)
class Certificate:
    """The best number of replicas by the exact solver, with its fewest stages and Z, and the plan's gaps.

    ``gap_k`` and ``gap_z`` are to that best, ``gap_stages`` to s*(k) at the plan's own k. The objective
    ``throughput`` is no function of k and stages: there the best k is the plan's, and Z has no gap.
    """

    method: Literal["exhaustive", "HiGHS"]
    k: int
    stages: int
    z: float | None
    gap_k: int
    gap_stages: int
    gap_z: float | None


def show_plan(path: Path, *, as_json: bool, certified: bool) -> int:
    """``p2pllm plan``. Raises ClusterError for bad files, ModelError when its peers cannot hold the model."""
    cluster = read_cluster(path)
    outcome = make_plan(cluster)
    certificate = certify(cluster, outcome.plan) if certified else None
    console = Console(markup=False, highlight=False)
    if as_json:
        body = outcome_json(cluster, outcome)
        if certified:
            body["certificate"] = certificate and asdict(certificate)
        console.out(json.dumps(body, allow_nan=False))
    else:
        print_outcome(console, cluster, outcome)
        if certified:
            console.print(_verdict(certificate), soft_wrap=True)
    return 0


def make_plan(cluster: Cluster) -> Outcome:
    """Run both phases. Raises ModelError, saying how many layers are missing."""
    began = time.perf_counter()
    plan = place(cluster.layers, cluster.offers, cluster.network, goal=cluster.goal, today=cluster.today)
    phase1_s = time.perf_counter() - began
    holders = [cluster.holder(part) for part in plan.assignment.slices]
    chain, no_chain = None, ""
    began = time.perf_counter()
    try:
        chain = find_chain(
            cluster.layers,
            holders,
            cluster.network,
            entry=cluster.entry,
            expected_tokens=cluster.expected_tokens,
        )
    except NoRouteError as error:
        no_chain = str(error)
    phase2_s = time.perf_counter() - began
    return Outcome(plan, chain, no_chain, 1e3 * phase1_s, 1e3 * phase2_s)


def certify(cluster: Cluster, plan: Plan) -> Certificate | None:
    """Hold a plan against the exact solver; None when it crosses regions, which that does not solve.

    Raises ModelError when the swarm is too large for it, or scipy is missing.
    """
    fewest = fewest_stages(cluster.layers, cluster.offers)
    if plan.crossings or not fewest:
        return None
    terms = Terms(plan.r_rtt_s, plan.t_comp_s, cluster.goal.alpha)
    match cluster.goal.objective:
        case "linear":
            z = {k: terms.linear(k, stages) for k, stages in fewest.items()}
        case "ratio":
            z = {k: terms.ratio(k, stages) for k, stages in fewest.items()}
        case "throughput":
            z = {}
    best = max(z, key=lambda k: (z[k], -fewest[k]), default=plan.k)
    return Certificate(
        method="exhaustive" if len(cluster.offers) <= EXHAUSTIVE_PEERS else "HiGHS",
        k=best,
        stages=fewest[best],
        z=z.get(best),
        gap_k=best - plan.k,
        gap_stages=plan.stages - fewest[plan.k],
        gap_z=z[best] - plan.z if z else None,
    )


def outcome_json(cluster: Cluster, outcome: Outcome) -> dict[str, Any]:
    """Return the object of ``plan --json``: seconds, layers ``[start, end)``, times in ms."""
    plan, chain, region_of = outcome.plan, outcome.chain, cluster.network.region_of
    return {
        "k": plan.k,
        "stages": plan.stages,
        "z": plan.z,
        "candidates": [{"k": some.k, "stages": some.stages, "z": some.z} for some in plan.candidates],
        "pipelines": [
            {
                "region": "+".join(dict.fromkeys(region_of[part.peer] for part in pipeline.slices)),
                "stages": _parts(pipeline.slices),
            }
            for pipeline in plan.pipelines
        ],
        "spares": _parts(plan.spares),
        "chain": _parts(chain.stages if chain else ()),
        "chain_latency_s": chain.latency_s if chain else None,
        "no_chain": outcome.no_chain,
        "crossings": plan.crossings,
        "objective": cluster.goal.objective,
        "scores": asdict(plan.scores),
        "stages_bound": plan.stages_bound,
        "z_bound": plan.z_bound,
        "r_rtt_s": plan.r_rtt_s,
        "t_comp_s": plan.t_comp_s,
        "kept": plan.kept,
        "elapsed_ms": {"phase1": round(outcome.phase1_ms, 3), "phase2": round(outcome.phase2_ms, 3)},
    }


def _parts(parts: Iterable[Slice | Stage]) -> list[dict[str, Any]]:
    return [{"peer": part.peer, "start": part.start, "end": part.end} for part in parts]


def print_outcome(console: Console, cluster: Cluster, outcome: Outcome) -> None:
    """Print who holds what as a table, and below it the chain and what the figures mean."""
    plan, region_of = outcome.plan, cluster.network.region_of
    table = Table(
        title=Text(f"{cluster.model} · {cluster.layers} layers · {len(cluster.offers)} peers"),
        title_justify="left",
    )
    for heading in ("pipeline", "region", "peer"):
        table.add_column(heading)
    for heading in ("layers", "a token takes"):
        table.add_column(heading, justify="right")
    groups = [(str(number), pipeline.slices) for number, pipeline in enumerate(plan.pipelines, 1)]
    for name, parts in [*groups, ("spare", plan.spares)]:
        for part in parts:
            holder = cluster.holder(part)
            seconds = (part.end - part.start) * holder.layer_s + (part.end == cluster.layers) * holder.head_s
            cells = (name, region_of[part.peer], part.peer, f"{part.start}:{part.end}", _ms(seconds))
            table.add_row(*map(Text, cells))
        table.add_section()
    console.print(table)
    for line in _remarks(cluster, outcome):
        console.print(line, soft_wrap=True)


def _remarks(cluster: Cluster, outcome: Outcome) -> Iterator[str]:
    """Yield a line for the chain, for each figure, and for whatever is out of the ordinary."""
    plan, chain = outcome.plan, outcome.chain
    if chain is None:
        yield f"chain: none, {outcome.no_chain}"
    else:
        stages = " → ".join(f"{stage.peer} {stage.start}:{stage.end}" for stage in chain.stages)
        yield f"chain: {stages}, {_ms(chain.latency_s)} a token"
    proof = "no fewer will do" if plan.stages == plan.stages_bound else f"at least {plan.stages_bound} needed"
    yield f"k = {plan.k}: replicas of the model, in {plan.stages} stages ({proof})"
    meaning = {
        "linear": "replicas, less the share of a token's time that goes into hops",
        "ratio": "replicas per second that a token takes",
        "throughput": "predicted tokens/s",
    }[cluster.goal.objective]
    yield f"Z = {plan.z:.4g}: {meaning} (no plan exceeds {plan.z_bound:.4g})"
    yield f"predicted: {plan.scores.throughput:.4g} tokens/s, with one session on each replica"
    if plan.crossings:
        yield f"no region holds the model alone: the pipeline crosses regions {plan.crossings} times"
    if plan.kept:
        yield "the pipelines of today stay: others would gain less than 5 %"
    yield f"Phase 1 took {outcome.phase1_ms:.2f} ms, Phase 2 {outcome.phase2_ms:.2f} ms"


def _verdict(certificate: Certificate | None) -> str:
    """Return what the exact solver says, in a line."""
    if certificate is None:
        return "certified: nothing, for the exact solver keeps to regions"
    z = "" if certificate.gap_z is None else f", {certificate.gap_z:.4g} in Z"
    gaps = f"{certificate.gap_k} replicas, {certificate.gap_stages} stages{z}"
    return f"certified ({certificate.method}): short of the best by {gaps}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
