"""What this machine gives to one peer: device, dtype, threads, memory, and how fast it is."""

from __future__ import annotations

from dataclasses import dataclass

from p2pllm.config import PeerConfig
from p2pllm.execution import DTYPES, Checkpoint, choose_device, default_dtype, default_threads, probe
from p2pllm.scheduling import Budget, ModelSize, Offer, PeerId, Request, Roofline

__all__ = ["Machine", "model_size", "offer", "survey"]


@dataclass(frozen=True, slots=True)
class Machine:
    """The share of one peer. Bytes, FLOP/s, bytes/s."""

    name: str
    device: str
    dtype: str
    threads: int
    memory_bytes: int
    flops: float
    bandwidth: float


def survey(config: PeerConfig, local_peers: int) -> Machine:
    """Measure the machine and settle what the flags left open. Blocks for a second or two.

    ``local_peers`` is how many peers share this machine, this one included. Raises UsageError for a device
    that is not here.
    """
    device = choose_device(config.device)
    threads = config.threads or default_threads(local_peers)
    measured = probe(device, threads)
    return Machine(
        name=measured.name,
        device=device,
        dtype=config.dtype or default_dtype(device),
        threads=threads,
        memory_bytes=config.memory or measured.memory_bytes // local_peers,
        flops=measured.flops,
        bandwidth=measured.bandwidth,
    )


def model_size(checkpoint: Checkpoint, dtype: str) -> ModelSize:
    """A checkpoint in bytes, as the scheduler takes it."""
    return ModelSize(
        layers=checkpoint.layers,
        layer_bytes=checkpoint.layer_bytes(dtype),
        embed_bytes=checkpoint.embed_bytes(dtype),
        head_bytes=checkpoint.head_bytes(dtype),
        kv_bytes_per_token_layer=checkpoint.kv_bytes(dtype),
        tied=checkpoint.tied,
    )


def offer(peer: PeerId, region: str, machine: Machine, size: ModelSize) -> Offer:
    """What a peer brings to a placement: room by its memory, speed by the roofline of its hardware."""
    budget, roofline, request = Budget(), Roofline(machine.flops, machine.bandwidth), Request()
    item = DTYPES[machine.dtype]
    return Offer(
        peer,
        region,
        budget.capacity(size, machine.memory_bytes),
        layer_s=roofline.layer_s(size.layer_bytes, size.layer_bytes / item, request, "mix"),
        head_s=roofline.head_s(size.head_bytes, size.head_bytes / item, request, "mix"),
        kv_bytes=budget.kv_bytes(size, machine.memory_bytes),
        flops=machine.flops,
    )
