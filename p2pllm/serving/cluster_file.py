"""A live swarm as a CLUSTER.json: the very facts that its leader plans from, for the command ``plan``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from p2pllm.scheduling import Assignment, ModelSize, PeerId, Rho, Slice
from p2pllm.swarm import PeerState

__all__ = ["cluster_json"]

ALL_PAIRS = 64
"""Swarms of up to so many peers are described by ρ of every pair; larger ones by what was measured."""


def cluster_json(
    *,
    name: str,
    size: ModelSize,
    parameters: float,
    peers: Sequence[PeerState],
    rho: Rho,
    today: Assignment | None = None,
) -> dict[str, Any]:
    """The body of ``/api/cluster``. ``parameters`` are those of one layer; ``rho`` is what the leader uses,
    and ``today`` who holds what.

    Peers that are leaving or paused, or whose layers are pinned, are left out, as a placement leaves them
    out.
    """
    placed = [state for state in peers if not (state.body.leaving or state.body.paused or state.body.pinned)]
    ids = [state.peer for state in placed]
    pairs = itertools.permutations(ids, 2) if len(ids) <= ALL_PAIRS else _measured(placed)
    file: dict[str, Any] = {
        "model": {
            "name": name,
            "layers": size.layers,
            "layer_bytes": size.layer_bytes,
            "embed_bytes": size.embed_bytes,
            "head_bytes": size.head_bytes,
            "kv_bytes_per_token_layer": size.kv_bytes_per_token_layer,
            "layer_params": round(parameters),
            "tied": size.tied,
        },
        "peers": [
            {
                "id": state.peer,
                "region": state.body.region,
                "memory_bytes": state.body.memory_bytes,
                "flops": state.body.flops,
                "bandwidth": state.body.bandwidth,
            }
            for state in placed
        ],
        "network": {"pairs": [[a, b, seconds] for a, b in pairs if (seconds := rho(a, b)) is not None]},
    }
    if today is not None:
        pipelines = [{"stages": _pieces(pipeline.slices)} for pipeline in today.pipelines]
        file["today"] = {"pipelines": pipelines, "spares": _pieces(today.spares)}
    return file


def _pieces(slices: Sequence[Slice]) -> list[dict[str, Any]]:
    return [{"peer": piece.peer, "start": piece.start, "end": piece.end} for piece in slices]


def _measured(peers: Sequence[PeerState]) -> list[tuple[PeerId, PeerId]]:
    """The pairs of which one peer has measured the way to the other."""
    prefixes = {state.peer[:16]: state.peer for state in peers}
    return [
        (state.peer, prefixes[prefix])
        for state in peers
        if state.metrics is not None
        for prefix, _ in state.metrics.rho
        if prefix in prefixes
    ]
