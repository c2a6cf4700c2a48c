"""What this machine gives to one peer: device, dtype, threads, memory, and how fast it is."""

from __future__ import annotations

from dataclasses import dataclass

from p2pllm.config import PeerConfig
from p2pllm.execution import (
    Checkpoint,
    check_quant,
    choose_device,
    default_dtype,
    default_threads,
    head_bytes,
    layer_bytes,
    probe,
    shares_head,
    weight_bytes,
)
from p2pllm.scheduling import Budget, ModelSize, Offer, PeerId, Request, Roofline

__all__ = ["Machine", "model_size", "offer", "survey"]


@dataclass(frozen=True, slots=True)
class Machine:
    """The share of one peer. Bytes, FLOP/s, bytes/s."""

    name: str
    device: str
    dtype: str
    quant: str
    threads: int
    memory_bytes: int
    flops: float
    bandwidth: float


def survey(config: PeerConfig, local_peers: int) -> Machine:
    """Measure the machine and settle what the flags left open. Blocks for a second or two.

    The data directory keeps how fast it is for the next start.

    ``local_peers`` is how many peers share this machine, this one included. Raises UsageError for a device
    that is not here, or one that does not compute with weights as ``--quant`` wants them.
    """
    device = choose_device(config.device)
    check_quant(config.quant, device)
    threads = config.threads or default_threads(local_peers)
    measured = probe(device, threads, config.data_dir / "hardware.json")
    return Machine(
        name=measured.name,
        device=device,
        dtype=config.dtype or default_dtype(device),
        quant=config.quant,
        threads=threads,
        memory_bytes=config.memory or measured.memory_bytes // local_peers,
        flops=measured.flops,
        bandwidth=measured.bandwidth,
    )


def model_size(checkpoint: Checkpoint, dtype: str, *, quant: str = "none", device: str = "cpu") -> ModelSize:
    """A checkpoint in bytes, as the scheduler takes it."""
    return ModelSize(
        layers=checkpoint.layers,
        layer_bytes=layer_bytes(checkpoint, dtype, quant),
        embed_bytes=checkpoint.embed_bytes(dtype),
        head_bytes=head_bytes(checkpoint, dtype, quant),
        kv_bytes_per_token_layer=checkpoint.kv_bytes(dtype),
        tied=checkpoint.tied and shares_head(dtype, device, quant),
    )


def offer(peer: PeerId, region: str, machine: Machine, size: ModelSize) -> Offer:
    """What a peer brings to a placement: room by its memory, speed by the roofline of its hardware."""
    budget, roofline, request = Budget(), Roofline(machine.flops, machine.bandwidth), Request()
    item = weight_bytes(machine.dtype, machine.quant)
    return Offer(
        peer,
        region,
        budget.capacity(size, machine.memory_bytes),
        layer_s=roofline.layer_s(size.layer_bytes, size.layer_bytes / item, request, "mix"),
        head_s=roofline.head_s(size.head_bytes, size.head_bytes / item, request, "mix"),
        kv_bytes=budget.kv_bytes(size, machine.memory_bytes),
        flops=machine.flops,
    )
