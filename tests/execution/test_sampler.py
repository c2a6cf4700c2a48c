"""Sampling against transformers' own warpers, and against the distribution it promises."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from p2pllm.errors import SessionError
from p2pllm.execution import SamplingParams
from p2pllm.execution.sampler import keep, sample, uniform

SETTINGS = [
    (1.0, 0, 0.9),
    (0.7, 0, 0.5),
    (1.5, 10, 1.0),
    (0.8, 40, 0.95),
    (1.0, 1, 1.0),
    (1.0, 0, 0.01),
    (2.0, 5000, 0.99),
    (8.0, 0, 0.98),
    (1.0, 0, 0.99),
]


@pytest.mark.parametrize("size", [1000, 10_000])
@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
def test_keeps_what_transformers_keeps(temperature: float, top_k: int, top_p: float, size: int) -> None:
    torch.manual_seed(5)
    for _ in range(20):
        logits = torch.randn(size) * 3
        scores = TemperatureLogitsWarper(temperature)(None, logits[None])
        expected = scores
        if top_k:
            expected = TopKLogitsWarper(top_k)(None, expected)
        if top_p < 1:
            expected = TopPLogitsWarper(top_p)(None, expected)
        kept = keep(scores[0], top_k=top_k, top_p=top_p)
        everything = torch.arange(size) if kept is None else kept
        assert everything.tolist() == (expected[0] > float("-inf")).nonzero().flatten().tolist()


def test_equal_scores_at_the_edge_of_top_k_all_stay() -> None:
    scores = torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0])
    kept = keep(scores, top_k=2, top_p=1.0)
    assert kept is not None
    assert kept.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(top_p=0.9999999), SamplingParams(top_k=4)]
)
def test_the_highest_chance_draws_a_token_that_has_any(params: SamplingParams) -> None:
    logits = torch.tensor([1.0, float("-inf"), 2.0, 0.5, float("-inf"), -200.0])
    assert sample(logits, params, 1 - 2**-53) == 3


@pytest.mark.parametrize(
    ("chance", "token"), [(0.0, 0), (0.09, 0), (0.11, 2), (0.59, 2), (0.61, 3), (0.9999999, 3)]
)
def test_chance_walks_the_tokens_in_order_of_id(chance: float, token: int) -> None:
    logits = torch.tensor([0.1, 0.0, 0.5, 0.4]).log()
    assert sample(logits, SamplingParams(), chance) == token


def test_dropped_tokens_are_never_drawn() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    params = SamplingParams(top_k=2)
    assert {sample(logits, params, chance / 1000) for chance in range(1000)} == {2, 3}
    assert sample(logits, params, 0.42) == 2  # 0.3 of 0.7 are token 2's
    assert sample(logits, params, 0.44) == 3


def test_temperature_sharpens() -> None:
    logits = torch.tensor([1.0, 2.0])
    # The odds of e become e², so token 1 begins at 1 / (1 + e²) = 0.119.
    assert sample(logits, SamplingParams(temperature=0.5), 0.118) == 0
    assert sample(logits, SamplingParams(temperature=0.5), 0.120) == 1


@pytest.mark.parametrize("temperature", [0, 1e-9, 5e-324])
def test_greedy_takes_the_best(temperature: float) -> None:
    logits = torch.tensor([1.0, 5.0, 4.999])
    assert sample(logits, SamplingParams(temperature=temperature), 0.999) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_no_numbers(value: float) -> None:
    with pytest.raises(SessionError, match="no finite logits"):
        sample(torch.full((4,), value), SamplingParams(), 0.5)


@given(st.integers(-(2**70), 2**70), st.integers(0, 2**40))
def test_uniform_is_in_range(seed: int, position: int) -> None:
    assert 0 <= uniform(seed, position) < 1


def test_uniform_is_fixed_for_ever() -> None:
    """Computed apart, from the definition: BLAKE2b of "seed:position", its first 53 bits."""
    from hashlib import blake2b

    bits = bin(int.from_bytes(blake2b(b"7:123", digest_size=8).digest(), "big"))[2:].zfill(64)
    expected = sum(int(bit) * 2.0 ** -(i + 1) for i, bit in enumerate(bits[:53]))
    assert uniform(7, 123) == expected


def test_uniform_is_even() -> None:
    counts = [0] * 10
    for position in range(5000):
        counts[int(uniform(1, position) * 10)] += 1
    assert all(430 <= count <= 570 for count in counts)
