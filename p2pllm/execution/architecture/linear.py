"""Linear layers whose weights lie in memory the way their kernels read them.

Decoding one token reads every weight once, so how fast it goes depends on the order in which they lie. Linear
layers that are fed the same input (query, key and value; gate and up) are one product here: the first of them
that is called computes it, and each takes its part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from p2pllm.errors import ModelError
from p2pllm.execution.architecture.kernels import Kernel

__all__ = ["Bundle", "Part"]


class Bundle:
    """The weights of one or more linear layers that are fed the same input."""

    def __init__(self, linears: Sequence[nn.Linear], make: Callable[[Tensor], Kernel]) -> None:
        """``make`` turns a weight (out, in) into what multiplies with it."""
        self.parts = [Part(self, index, linear) for index, linear in enumerate(linears)]
        self._make = make
        self._sizes = [linear.out_features for linear in linears]
        self._waiting: dict[int, Tensor] = {}
        self._kernel: Kernel | None = None
        self._bias: Tensor | None = None
        self._input: Tensor | None = None
        self._products: Sequence[Tensor] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the weights that are here in the kernel's own form, and so in no parameter."""
        return 0 if self._kernel is None or self._kernel.dense is not None else self._kernel.nbytes

    def fill(self, index: int, weight: Tensor) -> None:
        """Take one layer's weight (out, in); with the last of them the bundle can run. One on the meta device
        empties it.
        """
        if weight.is_meta:
            self._empty()
            return
        self._waiting[index] = weight
        if len(self._waiting) == len(self.parts):
            weights = [self._waiting.pop(part) for part in range(len(self.parts))]
            whole = weights[0] if len(weights) == 1 else torch.cat(weights)
            del weights  # they need not be here three times
            self._kernel = self._make(whole)
            self._bias = None
            if self._kernel.dense is not None:
                for part, view in zip(self.parts, torch.split(self._kernel.dense, self._sizes), strict=True):
                    part.show(view)

    def _empty(self) -> None:
        self._waiting.clear()
        self._kernel = self._bias = self._input = None
        self._products = ()
        for part in self.parts:
            part.show(torch.empty_like(part.weight, device="meta"))

    def product(self, index: int, rows: Tensor) -> Tensor:
        """(…, out of layer ``index``) for rows (…, in). Raises `ModelError` if the weights are not here."""
        if len(self.parts) == 1:
            return self._multiply(rows)
        if rows is not self._input:
            self._products = self._multiply(rows).split_with_sizes(self._sizes, -1)
            self._input = rows
        product = self._products[index]
        if index == len(self.parts) - 1:  # called last: keep nothing until the next step
            self._input, self._products = None, ()
        return product

    def _multiply(self, rows: Tensor) -> Tensor:
        if self._kernel is None:
            raise ModelError("the weights of these layers are not here")
        if self._bias is None and self.parts[0].bias is not None:
            self._bias = torch.cat([part.bias for part in self.parts if part.bias is not None])
        return self._kernel(rows, self._bias)


class Part(nn.Module):
    """One of the linear layers of a `Bundle`, in the place of the ``nn.Linear`` that it was.

    ``weight`` has its shape and type, but its values only where the kernel keeps them in rows.
    """

    def __init__(self, bundle: Bundle, index: int, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bundle = bundle
        self._index = index

    def fill(self, weight: Tensor) -> None:
        """Give the layer its weight."""
        self.bundle.fill(self._index, weight)

    def show(self, weight: Tensor) -> None:
        """Let ``weight`` be what others see."""
        self._parameters["weight"] = nn.Parameter(weight, requires_grad=False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.bundle.product(self._index, rows)

    __call__ = forward  # nobody hooks it
