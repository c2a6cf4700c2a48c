"""Products with weights, each kind storing them in the layout that it reads fastest.

Which is fastest was measured on CPUs with AVX-512 and AMX, one to 256 rows: float32 with the weight's columns
contiguous, bfloat16 in oneDNN's own blocks (twice as fast as rows, at any number of rows).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

__all__ = ["INT4_GROUP", "Columns", "Kernel", "kernel_for"]

INT4_GROUP = 32
"""Weights of a row that share a scale and an offset in int4: as many as in GGUF's Q4 files, which so keep
their values.
"""

_TYPICAL_ROWS = 16
"""oneDNN picks its blocks for so many rows; they serve others as well."""

_TILE = 64
"""The integer kernels take rows in tiles of so many; others crash them."""

_ROWS_AT_ONCE = 4096
"""Rows of a weight that are coded at once, so that coding needs little memory beside it."""

_SMALLEST = 1e-12
"""Scale of a row of zeros."""

_FLOAT8 = torch.float8_e4m3fn


class Kernel(Protocol):
    """Multiplies rows with one weight (out, in)."""

    @property
    def nbytes(self) -> int:
        """Bytes that the weight takes."""

    @property
    def dense(self) -> Tensor | None:
        """The weight (out, in) itself, where it is kept as such."""

    def __call__(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """(…, out) for rows (…, in), in the type of the rows."""


def kernel_for(dtype: torch.dtype, device: torch.device, quant: str) -> Callable[[Tensor], Kernel]:
    """What to make of weights of ``dtype`` on ``device``, with ``quant`` as `check_quant` allows it there."""
    if quant != "none":
        coded: dict[str, Callable[[Tensor], Kernel]] = {"fp8": Float8, "int8": Int8, "int4": Int4}
        return coded[quant]
    if device.type != "cpu":
        return Dense
    if dtype == torch.float32:
        return Columns
    ops: Any = torch.ops.mkldnn
    blocks = {
        torch.bfloat16: ops._is_mkldnn_bf16_supported,
        torch.float16: ops._is_mkldnn_fp16_supported,
    }
    return Blocks if torch._C._has_mkldnn and blocks[dtype]() else Dense


class Dense:
    """The weight as it is."""

    def __init__(self, weight: Tensor) -> None:
        self.dense: Tensor | None = weight
        self._weight = weight
        self.nbytes = weight.nbytes

    def __call__(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        return linear(rows, self._weight, bias)


class Columns(Dense):
    """The weight with its columns contiguous."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight.t().contiguous().t())


class Blocks:
    """The weight in oneDNN's blocks."""

    dense: Tensor | None = None

    def __init__(self, weight: Tensor) -> None:
        ops: Any = torch.ops.mkldnn
        self._packed = ops._reorder_linear_weight(weight.contiguous(), _TYPICAL_ROWS)
        self._multiply = ops._linear_pointwise.default
        self.nbytes = weight.nbytes

    def __call__(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        product: Tensor = self._multiply(rows, self._packed, bias, "none", [], "")
        return product


class Int8:
    """Eight bits a weight, a scale for each output. Many rows at once read it back as bfloat16."""

    dense: Tensor | None = None
    _FEW_ROWS = 10

    def __init__(self, weight: Tensor) -> None:
        self._outputs, inputs = weight.shape
        self._padding = -inputs % _TILE
        parts = [self._coded(rows) for rows in torch.split(weight, _ROWS_AT_ONCE)]
        self._codes = torch.cat([codes for codes, _ in parts])
        self._scales = torch.cat([scales for _, scales in parts])
        self.nbytes = self._codes.nbytes + self._scales.nbytes

    def _coded(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        full = pad(rows.float(), (0, self._padding, 0, -len(rows) % _TILE))
        scales = (full.abs().amax(1) / 127).clamp_min(_SMALLEST).to(torch.bfloat16)
        return (full / scales.float().unsqueeze(1)).round().clamp(-127, 127).to(torch.int8), scales

    def __call__(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        flat = _flat(rows, self._padding)
        if len(flat) <= self._FEW_ROWS:
            product = torch._weight_int8pack_mm(flat, self._codes, self._scales)
        else:
            product = linear(flat, self._codes.to(torch.bfloat16)) * self._scales
        return _finish(product[:, : self._outputs], rows, bias)


class Int4:
    """Four bits a weight, a scale and an offset for each `INT4_GROUP` of a row."""

    dense: Tensor | None = None

    def __init__(self, weight: Tensor) -> None:
        self._outputs, inputs = weight.shape
        self._padding = -inputs % INT4_GROUP
        parts = [self._coded(rows) for rows in torch.split(weight, _ROWS_AT_ONCE)]
        self._codes = torch.cat([codes for codes, _ in parts])
        self._scales = torch.cat([scales for _, scales in parts], 1)
        self.nbytes = self._codes.nbytes + self._scales.nbytes

    def _coded(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        full = pad(rows.float(), (0, self._padding, 0, -len(rows) % _TILE))
        groups = full.view(len(full), -1, INT4_GROUP)
        low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
        # The kernel multiplies with (code - 8) * scale + offset, both in bfloat16: code for what it will see.
        scales = ((high - low) / 15).clamp_min(_SMALLEST).to(torch.bfloat16)
        offsets = (low + 8 * scales.float()).to(torch.bfloat16)
        codes = ((groups - offsets.float()) / scales.float()).round().add(8).clamp(0, 15)
        packed = torch._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32).flatten(1), 1)
        return packed, torch.cat([scales, offsets], 2).transpose(0, 1).contiguous()

    def __call__(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        flat = _flat(rows, self._padding)
        product = torch._weight_int4pack_mm_for_cpu(flat, self._codes, INT4_GROUP, self._scales)
        return _finish(product[:, : self._outputs], rows, bias)


class Float8:
    """Eight bits of floating point a weight, a scale for each output."""

    dense: Tensor | None = None

    def __init__(self, weight: Tensor) -> None:
        full = weight.float()
        scales = full.abs().amax(1, keepdim=True).clamp_min_(1e-12) / torch.finfo(_FLOAT8).max
        self._codes = (full / scales).to(_FLOAT8)
        self._scales = scales.squeeze(1).to(weight.dtype)
        self.nbytes = self._codes.nbytes + self._scales.nbytes

    def __call__(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        product = linear(rows, self._codes.to(rows.dtype)) * self._scales
        return product if bias is None else product + bias


def _flat(rows: Tensor, padding: int) -> Tensor:
    """Rows (…, in) as the integer kernels take them: (rows, in), bfloat16, contiguous."""
    flat = rows.reshape(-1, rows.shape[-1]).to(torch.bfloat16)
    return pad(flat, (0, padding)) if padding else flat.contiguous()


def _finish(product: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
    """The product of flat rows in the shape and type of ``rows``, with the bias."""
    shaped = product.to(rows.dtype).reshape(*rows.shape[:-1], -1)
    return shaped if bias is None else shaped + bias
