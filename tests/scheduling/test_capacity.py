"""What fits into memory: known machines, cases worked by hand, and counting one layer at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pllm.errors import ModelError
from p2pllm.scheduling import Budget, Capacity, Fit, ModelSize, fit_slice, kv_room

MIB = 2**20
GIB = 2**30
SIZE = ModelSize(
    layers=10, layer_bytes=10 * MIB, embed_bytes=30 * MIB, head_bytes=40 * MIB, kv_bytes_per_token_layer=512
)
# 2048 tokens of 512 bytes are 1 MiB of KV reserve a layer; the workspace is 64 MiB.

LARGE = ModelSize(
    layers=36,
    layer_bytes=3_211_591_680,
    embed_bytes=1_158_266_880,
    head_bytes=1_158_266_880,
    kv_bytes_per_token_layer=4096,
)
QWEN3_32B = ModelSize(
    layers=64,
    layer_bytes=975_200_000,
    embed_bytes=1_560_000_000,
    head_bytes=1_560_000_000,
    kv_bytes_per_token_layer=4096,
)


def test_weights_of_the_four_kinds_of_slices() -> None:
    assert SIZE.weights(3, 5) == 20 * MIB
    assert SIZE.weights(0, 5) == 80 * MIB
    assert SIZE.weights(5, 10) == 90 * MIB
    assert SIZE.weights(0, 10) == 170 * MIB


def test_a_tied_head_is_a_copy_of_the_embedding_except_in_a_whole_model() -> None:
    tied = replace(SIZE, tied=True)
    assert tied.weights(0, 5) == 80 * MIB
    assert tied.weights(5, 10) == 90 * MIB
    assert tied.weights(0, 10) == 140 * MIB  # the head's 40 MiB are the embedding's 30 and a norm


@pytest.mark.parametrize(
    ("gigabytes", "expected"),
    [
        (80, Capacity(middle=13, first=13, last=13, both=12)),
        (40, Capacity(middle=6, first=6, last=6, both=5)),
        (32, Capacity(middle=5, first=4, last=4, both=4)),
        (24, Capacity(middle=4, first=3, last=3, both=3)),
    ],
)
def test_known_machines_with_half_of_their_memory(gigabytes: int, expected: Capacity) -> None:
    assert Budget(weights_ratio=0.5).capacity(LARGE, gigabytes * GIB) == expected


@pytest.mark.parametrize(("ratio", "layers"), [(0.5, 5 * 17 + 2 * 13), (0.65, 144)])
def test_five_gpus_of_32_and_two_of_24(ratio: float, layers: int) -> None:
    budget = Budget(weights_ratio=ratio)
    held = [budget.capacity(QWEN3_32B, memory * GIB).middle for memory in (32, 32, 32, 32, 32, 24, 24)]
    assert sum(held) == layers


def test_a_peer_that_holds_no_end_holds_a_middle() -> None:
    assert Budget().capacity(SIZE, (64 + 35) * MIB) == Capacity(middle=3, first=0, last=0, both=0)
    assert Budget().capacity(SIZE, (64 + 41) * MIB) == Capacity(middle=3, first=1, last=0, both=0)
    assert Budget().capacity(SIZE, 0) == Capacity.same(0)


def test_no_more_layers_than_the_model_has() -> None:
    assert Budget(weights_ratio=0.9).capacity(SIZE, GIB) == Capacity.same(10)


def test_a_tied_whole_model_fits_where_an_untied_one_does_not() -> None:
    memory = (64 + 110 + 40) * MIB
    assert Budget().capacity(SIZE, memory).both == 7
    assert Budget().capacity(replace(SIZE, tied=True), memory) == Capacity.same(10)


def test_the_kv_reserve_is_of_as_many_tokens_as_stated() -> None:
    assert Budget(kv_reserve_tokens=0).capacity(SIZE, (64 + 50) * MIB).middle == 5
    assert Budget(kv_reserve_tokens=20480).capacity(SIZE, (64 + 50) * MIB).middle == 2
    assert Budget(kv_reserve_tokens=20480).kv_bytes(SIZE, (64 + 50) * MIB) == 20 * MIB


def test_a_ratio_leaves_the_rest_to_kv_caches_and_activations() -> None:
    half = Budget(weights_ratio=0.5)
    assert half.kv_bytes(SIZE, 1000 * MIB) == (500 - 64) * MIB
    assert half.capacity(SIZE, 140 * MIB).middle == 7  # 70 MiB are left, more than activations take
    # Of 100 MiB half would be weights and 50 left, but activations take 64.
    assert half.capacity(SIZE, 100 * MIB).middle == 3
    assert half.kv_bytes(SIZE, 100 * MIB) == 0
    assert half.capacity(SIZE, 10 * MIB) == Capacity.same(0)


def test_memory_is_shared_out_in_one_way() -> None:
    with pytest.raises(ValueError, match="not by both"):
        Budget(weights_ratio=0.5, kv_reserve_tokens=100)
    for ratio in (0.0, -1.0, 1.1, float("nan")):
        with pytest.raises(ValueError, match="weights_ratio"):
            Budget(weights_ratio=ratio)
    with pytest.raises(ValueError, match="kv_reserve_tokens"):
        Budget(kv_reserve_tokens=-1)


@given(
    size=st.builds(
        ModelSize,
        layers=st.integers(1, 12),
        layer_bytes=st.integers(1, 50 * MIB),
        embed_bytes=st.integers(0, 90 * MIB),
        head_bytes=st.integers(0, 90 * MIB),
        kv_bytes_per_token_layer=st.integers(0, 8192),
        tied=st.booleans(),
    ),
    memory=st.integers(0, GIB),
    tokens=st.integers(0, 10_000),
)
def test_one_more_layer_would_not_fit(size: ModelSize, memory: int, tokens: int) -> None:
    def held(*, is_first: bool, is_last: bool) -> int:
        ends = is_first * size.embed_bytes + is_last * size.head_bytes
        if size.tied and is_first and is_last:
            ends = max(size.embed_bytes, size.head_bytes)
        layers = 0
        while layers < size.layers:
            need = (layers + 1) * (size.layer_bytes + tokens * size.kv_bytes_per_token_layer)
            if 64 * MIB + ends + need > memory:
                break
            layers += 1
        return layers

    fits = Budget(kv_reserve_tokens=tokens).capacity(size, memory)
    for is_first in (False, True):
        for is_last in (False, True):
            assert fits.at(is_first=is_first, is_last=is_last) == held(is_first=is_first, is_last=is_last)


@pytest.mark.parametrize(
    ("memory", "layers"), [(0, 0), (64 + 10, 0), (64 + 11, 1), (64 + 65, 5), (64 + 1000, 10)]
)
def test_capacity_counts_middle_layers(memory: int, layers: int) -> None:
    assert Budget().capacity(SIZE, memory * MIB).middle == layers


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


def test_room_for_kv_caches_while_a_peer_moves() -> None:
    # 100 MiB less 64 of workspace and 20 of weights leave 16; the reserve of 2 layers is 2, a quarter is 25.
    assert kv_room(SIZE, 100 * MIB, [(3, 5)]) == 16 * MIB
    assert kv_room(SIZE, 1000 * MIB, [(3, 5)]) == 250 * MIB  # a quarter of the whole, though more is left
    # Apart from each other, the old and the new slice weigh 30 + 20 + 40 + 10.
    assert kv_room(SIZE, 166 * MIB, [(0, 2), (9, 10)]) == 2 * MIB
    assert kv_room(SIZE, 160 * MIB, [(0, 2), (9, 10)]) == 0  # nothing is left: no new sessions meanwhile
