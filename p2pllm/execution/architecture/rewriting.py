"""Putting faster modules in the place of a model's own, where they compute the same.

What may be replaced is found by looking, not by the names of architectures: linear layers that were handed
the very same tensor when a small model ran, norms that give what torch's own RMS norm gives, and attention
that turns queries and keys by halves. When one token is decoded, calls cost more than what they compute, so
fewer of them is all that is gained.
"""

from __future__ import annotations

import copy
import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from types import FunctionType, MethodType
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from p2pllm.execution.architecture.kernels import Kernel
from p2pllm.execution.architecture.linear import Bundle

__all__ = ["Siblings", "find_siblings", "replace_linears", "replace_norms", "replace_rotary"]

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


_ROTARY: Final = "apply_rotary_pos_emb"
"""What transformers calls the function that turns queries and keys, in the module of every model."""


def replace_rotary(layers: nn.ModuleList) -> None:
    """Have attention within ``layers`` turn queries and keys in three calls each where it turns by halves."""
    turns: dict[Any, _Turn | None] = {}
    for module in layers.modules():
        forward: Any = inspect.unwrap(type(module).forward)
        turn = forward.__globals__.get(_ROTARY)
        if turn is None or _ROTARY not in forward.__code__.co_names:
            continue
        if turn not in turns:
            turns[turn] = _Turn(turn) if _turns_halves(turn) else None
        if (ours := turns[turn]) is not None:
            own = FunctionType(
                forward.__code__,
                forward.__globals__ | {_ROTARY: ours},
                forward.__name__,
                forward.__defaults__,
                forward.__closure__,
            )
            own.__kwdefaults__ = forward.__kwdefaults__
            vars(module)["forward"] = MethodType(own, module)


class _Turn:
    """Turns queries and keys by their positions' angles (Su et al. 2021, RoFormer), the halves of a head
    being the two coordinates. One for all layers, which in a step have the same angles, or the same few.
    """

    _MOST_ANGLES: Final = 4

    def __init__(self, original: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self._original = original
        self._angles: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        width = cos.shape[-1]
        if args or kwargs or width != query.shape[-1]:
            return self._original(query, key, cos, sin, *args, **kwargs)
        if id(sin) not in self._angles:
            if len(self._angles) >= self._MOST_ANGLES:
                self._angles.clear()
            low, high = sin.chunk(2, -1)
            # With the sines themselves, so that their identity stays theirs.
            self._angles[id(sin)] = sin, cos.unsqueeze(1), torch.cat((-low, high), -1).unsqueeze(1)
        _, along, across = self._angles[id(sin)]
        query, key = (torch.addcmul(part * along, part.roll(width // 2, -1), across) for part in (query, key))
        return query, key


def _turns_halves(turn: Callable[..., tuple[Tensor, Tensor]]) -> bool:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        query, key = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8)
        cos, sin = torch.randn(2, 1, 3, 8)
    try:
        theirs, ours = turn(query, key, cos, sin), _Turn(turn)(query, key, cos, sin)
    except (TypeError, RuntimeError, ValueError):  # it wants more, or gives something else
        return False
    return all(torch.allclose(*pair, rtol=1e-5, atol=1e-6) for pair in zip(theirs, ours, strict=True))


class _RmsNorm(nn.Module):
    """The RMS norm (Zhang & Sennrich 2019) in four calls on a CPU, where models take ten and torch's takes as
    many within.
    """

    def __init__(self, norm: nn.Module, eps: float) -> None:
        super().__init__()
        weight: Any = norm.weight
        self.weight: nn.Parameter = weight
        self._shape, self._eps = tuple(weight.shape), eps
        self._root = math.sqrt(weight.numel())
        self._least = torch.tensor(math.sqrt(weight.numel() * eps))
        self._scaled: tuple[weakref.ref[Tensor], Tensor] | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        weight = self.weight
        if weight.device.type != "cpu":
            return rms_norm(hidden, self._shape, weight, self._eps)
        if self._scaled is None or self._scaled[0]() is not weight:
            self._scaled = weakref.ref(weight), weight.float() * self._root
        # x / sqrt(mean(x²) + eps) = sqrt(n) · x / hypot(|x|, sqrt(n · eps))
        length: Tensor = torch.linalg.vector_norm(hidden, 2, -1, True, dtype=torch.float32)
        return (hidden / length.hypot(self._least)).mul_(self._scaled[1]).to(hidden.dtype)

    __call__ = forward  # nobody hooks it


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
        return torch.allclose(trial(rows), _RmsNorm(trial, eps)(rows), rtol=1e-5, atol=1e-6)
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
