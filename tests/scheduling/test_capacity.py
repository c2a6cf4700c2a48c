"""What fits into memory, worked by hand."""

from __future__ import annotations

import pytest

from p2pllm.errors import ModelError
from p2pllm.scheduling import Fit, ModelSize, capacity, fit_slice

MIB = 2**20
SIZE = ModelSize(
    layers=10, layer_bytes=10 * MIB, embed_bytes=30 * MIB, head_bytes=40 * MIB, kv_bytes_per_token_layer=512
)
# 2048 tokens of 512 bytes are 1 MiB of KV reserve a layer; the workspace is 64 MiB.


def test_weights_of_the_four_kinds_of_slices() -> None:
    assert SIZE.weights(3, 5) == 20 * MIB
    assert SIZE.weights(0, 5) == 80 * MIB
    assert SIZE.weights(5, 10) == 90 * MIB
    assert SIZE.weights(0, 10) == 170 * MIB


@pytest.mark.parametrize(
    ("memory", "layers"), [(0, 0), (64 + 10, 0), (64 + 11, 1), (64 + 65, 5), (64 + 1000, 10)]
)
def test_capacity_counts_middle_layers(memory: int, layers: int) -> None:
    assert capacity(SIZE, memory * MIB) == layers


def test_a_slice_fits_with_what_is_left_for_kv() -> None:
    assert fit_slice(SIZE, (64 + 22) * MIB, (4, 6)) == Fit(4, 6, 2 * MIB)
    assert fit_slice(SIZE, (64 + 180) * MIB, None) == Fit(0, 10, 10 * MIB)


@pytest.mark.parametrize(
    ("memory", "layers", "says"),
    [
        (64 + 21, (4, 6), "layers 4:6 need 86 MiB but this peer has 85 MiB: pass --layers with at most 1"),
        (64 + 179, None, "layers 0:10 need 244 MiB but this peer has 243 MiB"),
        (64 + 10, (4, 5), "layers 4:5 need 75 MiB but this peer has 74 MiB: raise --memory"),
        (1000, (4, 11), "4:11 is beyond the model, which has layers 0:10"),
    ],
)
def test_what_does_not_fit_says_what_would(memory: int, layers: tuple[int, int] | None, says: str) -> None:
    with pytest.raises(ModelError, match=says.replace("(", r"\(")):
        fit_slice(SIZE, memory * MIB, layers)
