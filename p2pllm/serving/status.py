"""What a peer sees of its swarm, as the API shows it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from p2pllm.errors import NoRouteError, RequestError
from p2pllm.execution import blocks_for
from p2pllm.records import MetricsBody
from p2pllm.scheduling import Chain, ModelSize, uncovered
from p2pllm.serving.cluster_file import cluster_json
from p2pllm.serving.entry import RESERVE_AHEAD, Router
from p2pllm.serving.front import Outlook
from p2pllm.swarm import PREFIX, PeerState, Swarm, SwarmPlan, latency_of

__all__ = ["Status"]

Json = dict[str, Any]

NO_METRICS = MetricsBody((), 0, 0.0, 0.0, 0.0, 0, 0, 0, 0, 0, 0.0, ())
"""Of a peer that has not said yet how it does."""


class Status:
    """The swarm as one peer sees it. Everything is as of the call."""

    def __init__(
        self,
        *,
        model: str,
        size: ModelSize,
        parameters: float,
        swarm: Swarm,
        router: Router,
        bootstrap: str,
        loading: Callable[[], float | None],
    ) -> None:
        """``parameters`` are those of one layer; ``bootstrap`` is what the peer was told to join through;
        ``loading`` says what share is here of the layers that it loads now, None if it loads none.
        """
        self.model = model
        self._size = size
        self._parameters = parameters
        self._swarm = swarm
        self._router = router
        self._bootstrap = bootstrap
        self._loading = loading

    def peers(self) -> tuple[PeerState, ...]:
        """All live peers."""
        return self._swarm.view.peers(time.monotonic())

    def missing(self) -> tuple[tuple[int, int], ...]:
        """Layers that nobody is ready to serve."""
        return self._uncovered(self.peers())

    async def other_models(self) -> list[str]:
        """The models that other swarms of the network serve."""
        return await self._swarm.other_models()

    def swarm(self) -> Json:
        """The body of ``/api/swarm``: ``route`` is the chain that a request would take now, ``contacts`` how
        many nodes of the DHT this peer knows, ``loading`` the share that is here of the layers it loads.
        """
        now, swarm, peers = time.monotonic(), self._swarm, self.peers()
        route: Chain | None = None
        with suppress(NoRouteError):
            route = self._router.chain(expected_tokens=1, preview=True)
        plan = swarm.leadership.plan
        return {
            "swarm": swarm.id.hex(),
            "model": self.model,
            "layers": self._size.layers,
            "self": swarm.own,
            "bootstrap": self._bootstrap,
            "contacts": swarm.contacts,
            "loading": self._loading(),
            "missing": [list(gap) for gap in self._uncovered(peers)],
            "leader": swarm.leadership.leader,
            "epoch": swarm.leadership.led_epoch,
            "plan": None if plan is None else _plan_json(plan, peers),
            "route": None
            if route is None
            else {"stages": _stages(route, peers), "latency_s": round(route.latency_s, 6)},
            "peers": [_peer_json(state, self._size.layers, now) for state in peers],
        }

    def cluster(self, *, planned: bool = False) -> Json:
        """The body of ``/api/cluster``: a CLUSTER.json of now, or of when this peer last placed everybody.

        Raises RequestError if it has placed nobody.
        """
        facts = self._swarm.leadership.facts if planned else None
        if planned and facts is None:
            raise RequestError("this peer has not placed the layers: ask the leader")
        peers = self.peers() if facts is None else facts.states
        return cluster_json(
            name=self.model,
            size=self._size,
            parameters=self._parameters,
            peers=peers,
            rho=latency_of(peers) if facts is None else facts.network,
            today=None if facts is None else facts.today,
        )

    def outlook(self, prompt: int) -> Outlook:
        """What a request of so many prompt tokens would meet now."""
        peers = self.peers()
        if missing := self._uncovered(peers):
            return Outlook(missing=missing)
        blocks = blocks_for(prompt + RESERVE_AHEAD)
        try:
            chain = self._router.chain(expected_tokens=RESERVE_AHEAD, kv_blocks=blocks, preview=True)
        except NoRouteError:
            return Outlook(has_room=False)
        waits = {state.peer: state.metrics.wait_s for state in peers if state.metrics is not None}
        wait_s = sum(waits.get(stage.peer, 0.0) for stage in chain.stages)
        return Outlook(work_s=max(0.0, chain.latency_s - wait_s), wait_s=wait_s)

    def stages(self, chain: Chain) -> list[Json]:
        """The stages of a chain with the regions of their peers."""
        return _stages(chain, self.peers())

    def _uncovered(self, peers: Sequence[PeerState]) -> tuple[tuple[int, int], ...]:
        return uncovered(self._size.layers, [holder for state in peers for holder in state.holders()])


def _stages(chain: Chain, peers: Sequence[PeerState]) -> list[Json]:
    regions = {state.peer: state.body.region for state in peers}
    return [
        {"peer": stage.peer, "region": regions.get(stage.peer, ""), "start": stage.start, "end": stage.end}
        for stage in chain.stages
    ]


def _plan_json(plan: SwarmPlan, peers: Sequence[PeerState]) -> Json:
    names = {state.peer[:PREFIX]: state.peer for state in peers}
    return {
        "leader": plan.leader,
        "epoch": plan.epoch,
        "number": plan.number,
        "replicas": plan.replicas,
        "stages": plan.stages,
        "z": plan.score,
        "slices": [
            {"peer": names.get(piece.peer, piece.peer), "start": piece.start, "end": piece.end}
            for piece in plan.slices
        ],
    }


def _peer_json(state: PeerState, layers: int, now: float) -> Json:
    body, metrics = state.body, state.metrics or NO_METRICS
    return {
        "peer": state.peer,
        "region": body.region,
        "addresses": [f"{host}:{port}" for host, port in body.addresses],
        "hardware": body.hardware,
        "dtype": body.dtype,
        "quantization": body.quantization,
        "software": body.software,
        "memory_bytes": body.memory_bytes,
        "memory_used": metrics.memory_used,
        "flops": body.flops,
        "bandwidth": body.bandwidth,
        "capacity": dict(zip(("middle", "first", "last", "both"), body.capacity, strict=True)),
        "leaving": body.leaving,
        "paused": body.paused,
        "pinned": body.pinned,
        "age_s": round(now - state.heard_s, 3),
        "spans": [{"start": span.start, "end": span.end, "state": span.state} for span in metrics.spans],
        "layer_s": metrics.layer_s,
        "head_s": metrics.head_s,
        "wait_s": metrics.wait_s,
        "tau_s": _tau(state, layers),
        "running": metrics.running,
        "waiting": metrics.waiting,
        "free_kv_blocks": metrics.free_kv_blocks,
        "cached_kv_blocks": metrics.cached_kv_blocks,
        "upload": metrics.upload,
        "generation": metrics.generation,
        "rho": dict(metrics.rho),
    }


def _tau(state: PeerState, layers: int) -> float:
    """τ of the peer's whole slice (s): what a decode step takes there, wait and head included."""
    return sum(
        holder.wait_s + (holder.end - holder.start) * holder.layer_s + (holder.end == layers) * holder.head_s
        for holder in state.holders()
    )
