"""Records with sensible contents."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from p2pllm.identity import Identity
from p2pllm.records import Body, MetricsBody, PeerBody, Record, Span, open_record, seal

SWARM = bytes(range(20))

PEER = PeerBody(
    addresses=(("127.0.0.1", 7600),),
    region="eu",
    hardware="cpu",
    certificate=bytes(32),
    memory_bytes=2**30,
    flops=1e11,
    bandwidth=1e10,
    capacity=(30, 28, 28, 26),
    kv_bytes=2**28,
    layer_s=0.001,
    head_s=0.002,
    dtype="float32",
    quantization="none",
    software="0.1.0",
    leaving=False,
    paused=False,
    pinned=False,
    replans=0,
    force=False,
)
METRICS = MetricsBody(
    spans=(Span(0, 10, "ready"),),
    generation=0,
    layer_s=0.001,
    head_s=0.002,
    wait_s=0.0,
    running=0,
    waiting=0,
    free_kv_blocks=100,
    cached_kv_blocks=0,
    memory_used=2**20,
    upload=0.0,
    rho=(),
)


def peer_body(**changes: Any) -> PeerBody:
    return replace(PEER, **changes)


def metrics_body(**changes: Any) -> MetricsBody:
    return replace(METRICS, **changes)


def record(
    identity: Identity, body: Body, *, seq: int = 1, swarm: bytes = SWARM, ttl: float = 30.0
) -> Record:
    return open_record(seal(identity, body, swarm=swarm, seq=seq, ttl=ttl))
