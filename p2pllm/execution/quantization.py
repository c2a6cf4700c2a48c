"""How weights may be kept, and how many bytes that takes. Free of torch: capacity is known before it is."""

from __future__ import annotations

import math

from p2pllm.errors import UsageError
from p2pllm.execution.checkpoint import Checkpoint, TensorInfo
from p2pllm.execution.types import DTYPES

__all__ = [
    "QUANTS",
    "check_quant",
    "head_bytes",
    "head_quant",
    "layer_bytes",
    "shares_head",
    "weight_bytes",
]

QUANTS = ("none", "fp8", "int8", "int4")
"""What ``--quant`` takes: only weights of linear layers are kept so, what is computed stays in the dtype."""

_BYTES = {"fp8": 1.0, "int8": 1.0, "int4": 0.625}
"""Of a weight. In int4 32 of a row share a scale and an offset of two bytes each."""

_SCALE_BYTES = 4
"""Of each output, where that has a scale."""


def check_quant(quant: str, device: str) -> None:
    """Raise `UsageError` where weights on ``device`` cannot be kept so."""
    if quant in ("int8", "int4") and device != "cpu":
        raise UsageError(f"--quant {quant} has kernels for CPUs only, not for {device}: leave it out")
    if quant == "fp8":
        import torch

        if not device.startswith("cuda") or torch.cuda.get_device_capability(torch.device(device)) < (8, 9):
            raise UsageError(
                f"--quant fp8 needs a GPU that computes in it, {device} does not: use int8 or int4"
            )


def head_quant(quant: str) -> str:
    """How the LM head is kept where layers are kept as ``quant`` says: it decides between near ties."""
    return "int8" if quant == "int4" else quant


def shares_head(dtype: str, device: str, quant: str) -> bool:
    """Whether an embedding that the head is tied to is in memory once where both are here: not where the head
    has a form of its own, which nobody can read rows of.
    """
    return quant == "none" and (device != "cpu" or dtype == "float32")


def weight_bytes(dtype: str, quant: str) -> float:
    """Bytes of one weight of a linear layer."""
    return _BYTES.get(quant, DTYPES[dtype])


def layer_bytes(checkpoint: Checkpoint, dtype: str, quant: str) -> int:
    """Bytes of the largest decoder layer."""
    sizes = [0.0] * checkpoint.layers
    for info in checkpoint.tensors.values():
        if info.layer is not None and info.layer < checkpoint.layers:
            sizes[info.layer] += _tensor_bytes(info, dtype, quant)
    return math.ceil(max(sizes))


def head_bytes(checkpoint: Checkpoint, dtype: str, quant: str) -> int:
    """Bytes that the last stage holds beyond its layers; tied embeddings are a copy there."""
    head = "embed" if checkpoint.tied else "head"
    infos = checkpoint.tensors.values()
    heads = sum(_tensor_bytes(info, dtype, head_quant(quant)) for info in infos if info.role == head)
    return math.ceil(heads) + sum(info.elements for info in infos if info.role == "norm") * DTYPES[dtype]


def _tensor_bytes(info: TensorInfo, dtype: str, quant: str) -> float:
    if quant == "none" or len(info.shape) != 2:
        return info.elements * DTYPES[dtype]
    return info.elements * _BYTES[quant] + (0 if quant == "int4" else info.shape[0] * _SCALE_BYTES)
