"""Weights of fewer bits than what is computed with them, coded from the values that they had.

Decoding reads every weight for each token, so it is as fast as they are small. What reads a whole prompt
computes instead, and decodes the weights once for all rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

__all__ = ["INT4_GROUP", "Float8", "Int4", "Int8"]

INT4_GROUP = 32
"""Weights of a row that share a scale and an offset in int4: as many as in GGUF's Q4 files, which so keep
their values.
"""

_TILE = 64
"""The integer kernels take rows in tiles of so many; others crash them."""

_ROWS_AT_ONCE = 512
"""Rows of a weight that are coded at once, so that coding needs little memory beside it."""

_SMALLEST = 1e-12
"""Scale of a row of zeros."""

_FLOAT8 = torch.float8_e4m3fn


class Int8:
    """Eight bits a weight, a scale for each output. Many rows at once read it back as bfloat16."""

    dense: Tensor | None = None
    _FEW_ROWS = 10

    def __init__(self, weight: Tensor) -> None:
        self._outputs, inputs = weight.shape
        self._padding = -inputs % _TILE
        coded_rows = self._outputs + -self._outputs % _TILE
        self._codes = torch.empty(coded_rows, inputs + self._padding, dtype=torch.int8)
        self._scales = torch.empty(coded_rows, dtype=torch.bfloat16)
        for at, rows in _pieces(weight, self._padding):
            self._code(rows, self._codes[at : at + len(rows)], self._scales[at : at + len(rows)])
        self.nbytes = self._codes.nbytes + self._scales.nbytes

    def _code(self, rows: Tensor, codes: Tensor, scales: Tensor) -> None:
        scales.copy_((torch.linalg.vector_norm(rows, torch.inf, 1) / 127).clamp_min_(_SMALLEST))
        codes.copy_(rows.div_(scales.float().unsqueeze(1)).round_().clamp_(-127, 127))

    def __call__(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        flat = _flat(rows, self._padding)
        if len(flat) <= self._FEW_ROWS:
            product = torch._weight_int8pack_mm(flat, self._codes, self._scales)
        else:
            product = linear(flat, self._codes.to(torch.bfloat16)) * self._scales
        return _finish(product, self._outputs, rows, bias)


class Int4:
    """Four bits a weight, a scale and an offset for each `INT4_GROUP` of a row. Many rows at once read it
    back as bfloat16.
    """

    dense: Tensor | None = None
    _FEW_ROWS = 32

    def __init__(self, weight: Tensor) -> None:
        self._outputs, inputs = weight.shape
        self._padding = -inputs % INT4_GROUP
        width, coded_rows = inputs + self._padding, self._outputs + -self._outputs % _TILE
        self._codes = torch.empty(coded_rows, width // 2, dtype=torch.uint8)
        self._scales = torch.empty(width // INT4_GROUP, coded_rows, 2, dtype=torch.bfloat16)
        for at, rows in _pieces(weight, self._padding):
            self._code(rows, self._codes[at : at + len(rows)], self._scales[:, at : at + len(rows)])
        self.nbytes = self._codes.nbytes + self._scales.nbytes

    def _code(self, rows: Tensor, codes: Tensor, factors: Tensor) -> None:
        groups = rows.view(len(rows), -1, INT4_GROUP)
        low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
        # The kernel multiplies with (code - 8) * scale + offset, both in bfloat16: code for what it will see.
        scales = ((high - low) / 15).clamp_min(_SMALLEST).to(torch.bfloat16)
        offsets = (low + 8 * scales.float()).to(torch.bfloat16)
        groups.sub_(offsets.float()).div_(scales.float()).round_().add_(8).clamp_(0, 15)
        codes.copy_(torch._convert_weight_to_int4pack_for_cpu(rows.to(torch.int32), 1))
        factors.copy_(torch.cat([scales, offsets], 2).transpose(0, 1))

    def __call__(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        flat = _flat(rows, self._padding)
        if len(flat) <= self._FEW_ROWS or not _is_unpacked_so():
            product = torch._weight_int4pack_mm_for_cpu(flat, self._codes, INT4_GROUP, self._scales)
        else:
            product = flat @ self._columns()
        return _finish(product, self._outputs, rows, bias)

    def _columns(self) -> Tensor:
        """The weight as the kernel sees it, (in, out), bfloat16."""
        groups, outputs, _ = self._scales.shape
        # Strided factors would take ten times as long.
        scales, offsets = (part.unsqueeze(1).contiguous() for part in self._scales.unbind(2))
        codes = _unpacked(self._codes).sub_(8).to(torch.bfloat16).view(groups, INT4_GROUP, outputs)
        return torch.addcmul(offsets, codes, scales).view(-1, outputs)


def _unpacked(codes: Tensor) -> Tensor:
    """The codes (in, out) of what torch packs on CPUs with AVX-512: tiles of outputs, the second half of each
    in the upper bits.
    """
    tiles = codes.view(torch.uint8).view(len(codes) // _TILE, -1, _TILE // 2)
    halves = torch.stack((tiles & 15, tiles >> 4), 2)  # (tiles, in, halves, outputs of a half)
    return halves.flatten(2).transpose(0, 1).flatten(1).view(torch.int8)


@cache
def _is_unpacked_so() -> bool:
    """Whether this CPU's packing is the one that `_unpacked` knows."""
    codes = torch.arange(2 * _TILE * 2 * INT4_GROUP).mul_(7).remainder_(16).view(2 * _TILE, -1)
    codes = (codes + torch.arange(2 * _TILE).unsqueeze(1) * 5 + codes // 3).remainder_(16)
    packed = torch._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
    return packed.nbytes * 2 == codes.numel() and torch.equal(_unpacked(packed).long(), codes.t())


class Float8:
    """Eight bits of floating point a weight, a scale for each output."""

    dense: Tensor | None = None

    def __init__(self, weight: Tensor) -> None:
        full = weight.float()
        scales = full.abs().amax(1, keepdim=True).clamp_min_(_SMALLEST) / torch.finfo(_FLOAT8).max
        self._codes = (full / scales).to(_FLOAT8)
        self._scales = scales.squeeze(1).to(weight.dtype)
        self.nbytes = self._codes.nbytes + self._scales.nbytes

    def __call__(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        product = linear(rows, self._codes.to(rows.dtype)) * self._scales
        return product if bias is None else product + bias


def _pieces(weight: Tensor, padding: int) -> Iterator[tuple[int, Tensor]]:
    """A weight in float32, in pieces of its own that may be written to: (first row, rows), with zeros behind
    the inputs and the last row as the integer kernels want them.
    """
    for at in range(0, len(weight), _ROWS_AT_ONCE):
        rows = weight[at : at + _ROWS_AT_ONCE]
        piece = torch.zeros(len(rows) + -len(rows) % _TILE, weight.shape[1] + padding)
        piece[: len(rows), : weight.shape[1]] = rows
        yield at, piece


def _flat(rows: Tensor, padding: int) -> Tensor:
    """Rows (…, in) as the integer kernels take them: (rows, in), bfloat16, contiguous."""
    flat = rows.to(torch.bfloat16).reshape(-1, rows.shape[-1])
    return pad(flat, (0, padding)) if padding else flat.contiguous()


def _finish(product: Tensor, outputs: int, rows: Tensor, bias: Tensor | None) -> Tensor:
    """The first ``outputs`` columns of a product of flat rows, in the shape and type of ``rows``, with the
    bias.
    """
    if product.shape[1] != outputs:
        product = product[:, :outputs]
    shaped = product.to(rows.dtype).view(*rows.shape[:-1], outputs)
    return shaped if bias is None else shaped + bias
