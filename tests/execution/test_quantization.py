"""Weights in other forms: what their products are, what they take, and where they are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from p2pllm.errors import ModelError, UsageError
from p2pllm.execution import Checkpoint, check_quant, head_bytes, layer_bytes, open_checkpoint, weight_bytes
from p2pllm.execution.architecture import coded, kernels
from p2pllm.execution.loader import Loader

SHAPES = [(64, 64), (100, 40), (384, 40), (4100, 72)]


def rows_and_weight(outputs: int, inputs: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(outputs + rows)
    return torch.randn(1, rows, inputs, generator=chance), torch.randn(outputs, inputs, generator=chance)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("rows", [1, 3, 15, 70])
@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (kernels.Dense, 1e-6),
        (kernels.Pieces, 1e-6),
        (coded.Float8, 0.04),  # 3 bits of mantissa: at most 1/16 of each weight
        (coded.Int8, 0.012),  # 1/127 of the largest weight of a row, and bfloat16's 1/256
        (coded.Int4, 0.1),  # 1/15 of a group's span, uniform: span · 1/15 / √12
    ],
)
def test_products(kind: Any, error: float, outputs: int, inputs: int, rows: int) -> None:
    x, weight = rows_and_weight(outputs, inputs, rows)
    before, bias = weight.clone(), torch.linspace(-1, 1, outputs)
    kernel = kind(weight)
    exact = x @ weight.T
    assert float((kernel(x, None) - exact).norm() / exact.norm()) < error
    assert torch.equal(weight, before)
    torch.testing.assert_close(kernel(x, bias), kernel(x, None) + bias)


def test_blocks_give_the_same_product_in_bfloat16() -> None:
    if kernels.kernel_for(torch.bfloat16, torch.device("cpu"), "none") is not kernels.Blocks:
        pytest.skip("this CPU has no bfloat16")
    x, weight = (tensor.bfloat16() for tensor in rows_and_weight(100, 40, 5))
    torch.testing.assert_close(
        kernels.Blocks(weight)(x, None).float(), (x @ weight.T).float(), rtol=0.01, atol=0.1
    )


def test_int4_reads_back_what_its_kernel_multiplies_with() -> None:
    x, weight = rows_and_weight(100, 40, 16)
    kernel = coded.Int4(weight)
    few = kernel(x, None)
    many = kernel(x.expand(5, -1, -1), None)
    torch.testing.assert_close(many, few.expand(5, -1, -1), rtol=0.01, atol=0.05)


def test_int4_keeps_values_that_have_four_bits_already() -> None:
    """As those of a GGUF file: 16 steps of a power of two are what the codes say."""
    codes = torch.arange(64 * 64).reshape(64, 64) * 7 % 16
    weight = (codes - 8) / 4.0
    kernel = coded.Int4(weight)
    torch.testing.assert_close(kernel(torch.eye(64).unsqueeze(0), None)[0], weight.T)


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_bytes_of_a_layer(quant: str, checkpoint: Checkpoint) -> None:
    """What capacity counts on is what a layer takes."""
    loader = Loader(checkpoint, dtype="bfloat16", device="cpu", quant=quant)
    loader.load(10, 12)
    assert loader.stage.weight_bytes == pytest.approx(
        2 * layer_bytes(checkpoint, "bfloat16", quant), rel=0.005
    )
    loader.stage.retain({10})
    loader.load(29, 30)
    expected = 2 * layer_bytes(checkpoint, "bfloat16", quant) + head_bytes(checkpoint, "bfloat16", quant)
    assert loader.stage.weight_bytes == pytest.approx(expected, rel=0.005)


def test_bytes_of_a_weight() -> None:
    assert [weight_bytes("bfloat16", quant) for quant in ("none", "int8", "int4")] == [2, 1, 0.625]


def test_refusals(saved_model: Callable[[str], tuple[Path, Any]]) -> None:
    with pytest.raises(UsageError, match="--quant int4 has kernels for CPUs only, not for cuda:0"):
        check_quant("int4", "cuda:0")
    with pytest.raises(UsageError, match="--quant fp8 needs a GPU"):
        check_quant("fp8", "cpu")
    experts = open_checkpoint(str(saved_model("mixtral")[0]))
    with pytest.raises(ModelError, match="mixtral stacks its experts: use --quant none"):
        Loader(experts, dtype="float32", device="cpu", quant="int8")
