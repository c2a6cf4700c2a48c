"""Putting faster modules in the place of a model's own, where they compute the same.

What may be replaced is found by looking, not by the names of architectures: linear layers that were handed
the very same tensor when a small model ran, and norms that give what torch's own RMS norm gives.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from p2pllm.execution.architecture.kernels import Kernel
from p2pllm.execution.architecture.linear import Bundle

__all__ = ["Siblings", "find_siblings", "replace_linears", "replace_norms"]

Siblings: TypeAlias = frozenset[tuple[str, ...]]
"""Names within a layer of linear layers that are fed the same tensor, in the order of their calls."""

_FUSED_BYTES = 64 << 20
"""Weights larger than this gain nothing from being one, and would need memory twice while they are joined."""


def find_siblings(layers: Iterable[nn.Module], run: Callable[[], object]) -> Siblings:
    """Which linear layers within ``layers`` are fed the same tensor while ``run`` runs the model.

    A layer that is called more than once, or not always together with the same others, is not among them.
    """
    names = {part: (layer, name) for layer in layers for name, part in _linears(layer)}
    calls: list[tuple[Any, Tensor]] = []
    hooks = [
        part.register_forward_pre_hook(lambda module, args: calls.append((module, args[0]))) for part in names
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    fed: dict[tuple[nn.Module, int], list[str]] = {}
    for part, rows in calls:  # which keeps the tensors, so their identities are their own
        layer, name = names[part]
        fed.setdefault((layer, id(rows)), []).append(name)
    groups = {tuple(group) for group in fed.values()}
    seen = [name for group in groups for name in group]
    return frozenset(
        group for group in groups if len(group) > 1 and all(seen.count(name) == 1 for name in group)
    )


def replace_linears(layer: nn.Module, siblings: Siblings, make: Callable[[Tensor], Kernel]) -> None:
    """Have all linear layers within ``layer`` multiply by what ``make`` makes of their weights, siblings at
    once.
    """
    found = dict(_linears(layer))
    fused = [group for group in siblings if _fit_together([found.get(name) for name in group])]
    alone = found.keys() - set(chain.from_iterable(fused))
    for group in (*fused, *((name,) for name in alone)):
        bundle = Bundle([found[name] for name in group], make)
        for name, part in zip(group, bundle.parts, strict=True):
            _replace(layer, name, part)


def replace_norms(module: nn.Module) -> None:
    """Have all norms within ``module`` that compute torch's RMS norm use it."""
    known: dict[type[nn.Module], bool] = {}
    for name, norm in list(module.named_modules()):
        eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        if isinstance(eps, float) and [key for key, _ in norm.named_parameters()] == ["weight"]:
            kind = type(norm)
            if kind not in known:
                known[kind] = _is_rms_norm(norm, eps)
            if known[kind]:
                _replace(module, name, _RmsNorm(norm, eps))


class _RmsNorm(nn.Module):
    """torch's RMS norm: one call where models spell it out."""

    def __init__(self, norm: nn.Module, eps: float) -> None:
        super().__init__()
        weight: Any = norm.weight
        self.weight: nn.Parameter = weight
        self._shape, self._eps = tuple(weight.shape), eps

    def forward(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self._shape, self.weight, self._eps)


def _is_rms_norm(norm: nn.Module, eps: float) -> bool:
    """Whether a norm gives the same as torch's for random rows and a random weight."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        trial: Any = copy.deepcopy(norm).to_empty(device="cpu").float()
        weight = trial.weight.data.normal_()
        rows = torch.randn(1, 3, *weight.shape)
    if weight.dim() != 1:
        return False
    try:
        return torch.allclose(trial(rows), rms_norm(rows, weight.shape, weight, eps), rtol=1e-5, atol=1e-6)
    except (TypeError, RuntimeError):  # it wants more than rows
        return False


def _linears(layer: nn.Module) -> list[tuple[str, nn.Linear]]:
    # Kinds of their own may do more than multiply.
    return [(name, part) for name, part in layer.named_modules() if type(part) is nn.Linear]


def _fit_together(linears: Sequence[nn.Linear | None]) -> bool:
    present = [linear for linear in linears if linear is not None]
    return (
        len(present) == len(linears)
        and len({(linear.in_features, linear.bias is None) for linear in present}) == 1
        and sum(linear.weight.nbytes for linear in present) <= _FUSED_BYTES
    )


def _replace(root: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    root.get_submodule(parent)._modules[leaf] = new
