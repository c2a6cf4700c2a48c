"""Which modules give way to faster ones, and that these compute the same."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.glm4 import modeling_glm4
from transformers.models.llama import modeling_llama
from transformers.models.phi3 import modeling_phi3

from p2pllm.errors import ModelError
from p2pllm.execution.architecture.kernels import Pieces
from p2pllm.execution.architecture.linear import Bundle, Part
from p2pllm.execution.architecture.rewriting import find_siblings, replace_norms, replace_rotary


class Layer(nn.Module):
    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.again = again
        self.left, self.right, self.down = nn.Linear(6, 4), nn.Linear(6, 2), nn.Linear(6, 3)
        self.twice = nn.Linear(6, 6)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.right(rows).sum() + self.left(rows).sum() + self.down(rows + 1).sum()
        return out + self.twice(self.twice(rows)).sum() if self.again else out


def test_siblings_are_fed_the_very_same_tensor() -> None:
    """``down`` has an equal shape only; ``twice`` has that tensor once, and then another."""
    plain, again = Layer(again=False), Layer(again=True)
    found = [find_siblings([layer], partial(layer, torch.ones(2, 6))) for layer in (plain, again)]
    assert found == [{("right", "left")}, set()]


class Gemma(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(6)), 1e-6

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(rows, (6,), None, self.eps) * (1 + self.weight)


class Llama(Gemma):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + self.eps) * self.weight


def test_only_norms_that_are_equal_are_replaced() -> None:
    model = nn.ModuleDict({"same": Llama(), "other": Gemma(), "centred": nn.LayerNorm(6, bias=False)})
    replace_norms(model)
    assert [type(model[name]) is kind for name, kind in (("same", Llama), ("other", Gemma))] == [False, True]
    assert type(model["centred"]) is nn.LayerNorm
    rows = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model["same"](rows), Llama()(rows))


@pytest.mark.parametrize("width", [8, 6])
@pytest.mark.parametrize(
    ("modeling", "halves"), [(modeling_llama, True), (modeling_phi3, True), (modeling_glm4, False)]
)
def test_rotary_is_replaced_where_heads_turn_by_halves(
    modeling: Any, halves: bool, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GLM turns neighbours. Phi turns only as much of a head as there are angles."""
    turn = modeling.apply_rotary_pos_emb

    class Attention(nn.Module):
        def forward(self, *args: torch.Tensor) -> object:
            return apply_rotary_pos_emb(*args)  # type: ignore[name-defined]  # noqa: F821

    monkeypatch.setitem(globals(), turn.__name__, turn)
    attention = Attention()
    replace_rotary(attention)
    assert ("forward" in vars(attention)) is halves
    if width == 8 or modeling is modeling_phi3:
        chance = torch.Generator().manual_seed(1)
        query, key = (torch.randn(1, heads, 5, 8, generator=chance) for heads in (4, 2))
        for _ in range(2):
            angles = torch.randn(2, 1, 5, width, generator=chance)
            torch.testing.assert_close(attention(query, key, *angles), turn(query, key, *angles))


def test_a_bundle_is_one_product() -> None:
    linears = [nn.Linear(6, 4), nn.Linear(6, 2)]
    bundle = Bundle(linears, Pieces)
    rows = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    bundle.parts[0].fill(linears[0].weight.data)
    with pytest.raises(ModelError):
        bundle.parts[0](rows)
    bundle.parts[1].fill(linears[1].weight.data)
    for _ in range(2):
        for part, linear in zip(bundle.parts, linears, strict=True):
            torch.testing.assert_close(part(rows), linear(rows))
        rows = rows * 2
    assert bundle._input is None
    assert all(isinstance(part, Part) and part.weight.data_ptr() for part in bundle.parts)
    bundle.parts[0].fill(torch.empty(4, 6, device="meta"))
    with pytest.raises(ModelError):
        bundle.parts[1](rows)
