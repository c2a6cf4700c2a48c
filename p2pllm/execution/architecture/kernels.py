"""Products with weights, each kind storing them in the layout that it reads fastest.

Which is fastest was measured on CPUs with AVX-512 and AMX, one to 256 rows: float32 as it is, but piece by
piece for a few rows, bfloat16 in oneDNN's own blocks (twice as fast as rows, at any number of rows).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from p2pllm.execution.architecture.coded import Float8, Int4, Int8

__all__ = ["Kernel", "Pieces", "kernel_for"]

_TYPICAL_ROWS = 16
"""oneDNN picks its blocks for so many rows; they serve others as well."""

_FEW_ROWS = 15
"""Up to so many, but for one, a product of pieces takes two thirds of the time of one of the whole weight."""
_PIECES = range(128, 31, -16)
"""How many rows of a weight may be a piece."""


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
        return Pieces
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


class Pieces(Dense):
    """The weight as it is, multiplied piece by piece where that is faster.

    Of the whole weight the libraries make a copy that suits them, which only pays with many rows. Small
    pieces they take as they are.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight.contiguous())
        out, width = weight.shape
        size = next((size for size in _PIECES if out % size == 0), 0)
        self._pieces = self._weight.view(-1, size, width).transpose(1, 2) if size else None

    def __call__(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        count = rows.numel() // rows.shape[-1]
        if self._pieces is None or not 1 < count <= _FEW_ROWS:
            return super().__call__(rows, bias)
        spread = rows.reshape(1, count, -1).expand(len(self._pieces), -1, -1)
        product = torch.bmm(spread, self._pieces).transpose(0, 1).reshape(*rows.shape[:-1], -1)
        return product if bias is None else product + bias


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
