"""Seconds per token: known GPUs, measured layers, and cases worked by hand."""

from __future__ import annotations

import math

import pytest

from p2pllm.scheduling import Request, Roofline

RTX_5090 = Roofline(flops=209.5e12, bandwidth=1792e9)
RTX_4090 = Roofline(flops=165e12, bandwidth=1008e9)
LAYER = (975.2e6, 487.6e6)
"""Bytes and parameters of a layer of Qwen3-32B in bf16."""


def test_memory_and_arithmetic_add_up_as_the_root_of_their_squares() -> None:
    # 93 bytes at 93 % of 10 bytes/s are 10 s; 2 · 95 · 12 FLOP at 95 % of 100 FLOP/s are 24 s.
    assert Roofline(flops=100.0, bandwidth=10.0).pass_s(93.0, 95.0, 12) == pytest.approx(26.0)


def test_decode_is_bound_by_bandwidth_and_prefill_by_arithmetic() -> None:
    request = Request(prompt=4096, tokens=128)
    decode = [gpu.layer_s(*LAYER, request, "decode") for gpu in (RTX_5090, RTX_4090)]
    assert decode[0] == pytest.approx(975.2e6 / (0.93 * 1792e9), rel=1e-3)
    assert decode[1] / decode[0] == pytest.approx(1.78, abs=0.005)
    prefill = [gpu.layer_s(*LAYER, request, "prefill") for gpu in (RTX_5090, RTX_4090)]
    assert prefill[0] == pytest.approx(975.2e6 / (0.95 * 209.5e12), rel=1e-2)
    assert prefill[1] / prefill[0] == pytest.approx(1.27, abs=0.005)


# One layer of LLaMA-2-70B in fp16, milliseconds for 2 tokens, and for prompts of 500 and 1000; measured
# FLOP/s and bandwidth of an A100-40, an L4 and a T4.
@pytest.mark.parametrize(
    ("flops", "bandwidth", "measured_ms"),
    [(244e12, 1222e9, (1.4, 4, 8)), (49e12, 248e9, (6.9, 20, 38)), (26e12, 241e9, (7.1, 30, 59))],
)
def test_close_to_measured_layers(
    flops: float, bandwidth: float, measured_ms: tuple[float, float, float]
) -> None:
    gpu = Roofline(flops, bandwidth)
    predicted_ms = [1e3 * gpu.pass_s(1.711e9, 855.6e6, tokens) for tokens in (2, 500, 1000)]
    assert predicted_ms == pytest.approx(list(measured_ms), rel=0.2)


def test_the_mix_is_a_whole_request_per_token_of_its_answer() -> None:
    request = Request(prompt=300, tokens=60)
    whole = RTX_4090.pass_s(*LAYER, 300) + 60 * RTX_4090.pass_s(*LAYER)
    assert RTX_4090.layer_s(*LAYER, request, "mix") * 60 == pytest.approx(whole)
    assert RTX_4090.layer_s(*LAYER, request, "prefill") * 300 == pytest.approx(RTX_4090.pass_s(*LAYER, 300))


def test_the_mix_leans_to_prefill_as_prompts_grow() -> None:
    def ratio(prompt: int) -> float:
        slow, fast = (gpu.layer_s(*LAYER, Request(prompt, 64), "mix") for gpu in (RTX_4090, RTX_5090))
        return slow / fast

    ratios = [ratio(prompt) for prompt in (1, 1000, 10_000, 1_000_000)]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] == pytest.approx(1.78, abs=0.01)
    assert ratios[-1] == pytest.approx(1.27, abs=0.01)


def test_a_prompt_needs_the_head_once() -> None:
    request = Request(prompt=300, tokens=60)
    once = math.hypot(1.56e9 / (0.93 * 1008e9), 2 * 0.78e9 / (0.95 * 165e12))
    assert RTX_4090.head_s(1.56e9, 0.78e9, request, "decode") == pytest.approx(once)
    assert RTX_4090.head_s(1.56e9, 0.78e9, request, "mix") == pytest.approx(once)
    assert RTX_4090.head_s(1.56e9, 0.78e9, request, "prefill") == pytest.approx(once / 300)
