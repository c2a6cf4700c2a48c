"""The body of ``/api/swarm``: the view as plain JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from p2pllm.records import MetricsBody
from p2pllm.scheduling import Chain, PeerId
from p2pllm.swarm import PeerState

__all__ = ["chain_json", "swarm_json"]

Json = dict[str, Any]

NO_METRICS = MetricsBody((), 0, 0.0, 0.0, 0.0, 0, 0, 0, 0, ())
"""Of a peer that has not said yet how it does."""


def swarm_json(
    *,
    swarm: bytes,
    model: str,
    layers: int,
    own: PeerId,
    peers: Sequence[PeerState],
    route: Chain | None,
    bootstrap: str,
    contacts: int,
    missing: Sequence[tuple[int, int]],
) -> Json:
    """The swarm as one peer sees it.

    ``route`` is the chain that a request would take now, ``bootstrap`` what the peer was told to join
    through, ``contacts`` how many nodes of the DHT it knows.
    """
    return {
        "swarm": swarm.hex(),
        "model": model,
        "layers": layers,
        "self": own,
        "bootstrap": bootstrap,
        "contacts": contacts,
        "missing": [list(gap) for gap in missing],
        "route": None
        if route is None
        else {"stages": chain_json(route, peers), "latency_s": round(route.latency_s, 6)},
        "peers": [_peer_json(state, layers) for state in peers],
    }


def chain_json(chain: Chain, peers: Sequence[PeerState]) -> list[Json]:
    """The stages of a chain with the regions of their peers."""
    regions = {state.peer: state.body.region for state in peers}
    return [
        {"peer": stage.peer, "region": regions.get(stage.peer, ""), "start": stage.start, "end": stage.end}
        for stage in chain.stages
    ]


def _peer_json(state: PeerState, layers: int) -> Json:
    body, metrics = state.body, state.metrics or NO_METRICS
    return {
        "peer": state.peer,
        "region": body.region,
        "addresses": [f"{host}:{port}" for host, port in body.addresses],
        "hardware": body.hardware,
        "dtype": body.dtype,
        "software": body.software,
        "memory_bytes": body.memory_bytes,
        "memory_used": metrics.memory_used,
        "flops": body.flops,
        "bandwidth": body.bandwidth,
        "capacity": body.capacity,
        "leaving": body.leaving,
        "age_s": round(state.age_s, 3),
        "spans": [{"start": span.start, "end": span.end, "state": span.state} for span in metrics.spans],
        "layer_s": metrics.layer_s,
        "head_s": metrics.head_s,
        "wait_s": metrics.wait_s,
        "tau_s": _tau(state, layers),
        "running": metrics.running,
        "waiting": metrics.waiting,
        "free_kv_blocks": metrics.free_kv_blocks,
    }


def _tau(state: PeerState, layers: int) -> float:
    """τ of the peer's whole slice (s): what a decode step takes there, wait and head included."""
    return sum(
        holder.wait_s + (holder.end - holder.start) * holder.layer_s + (holder.end == layers) * holder.head_s
        for holder in state.holders()
    )
