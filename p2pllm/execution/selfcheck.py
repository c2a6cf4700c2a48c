"""Proof, before any weights are read, that slicing a model changes nothing about what it computes.

A tiny model of the same kind and settings gets random weights and is run twice: whole, by transformers alone,
and cut in two stages, in chunks, with two sessions in one batch, the way it will be served. If the results
differ, the model is refused by name instead of giving wrong text.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from p2pllm.errors import ModelError
from p2pllm.execution.architecture import (
    Siblings,
    SlicedModel,
    build_model,
    decoder_layers,
    find_siblings,
)
from p2pllm.execution.attention import Segment
from p2pllm.execution.kv import private_caches
from p2pllm.execution.stage import Stage

__all__ = ["check_architecture"]

_Half = tuple[Stage, int, int]
"""A model and the layers [start, end) that it holds."""

_VOCABULARY = 96
_PROMPTS = ((3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26), (2, 71, 82, 81, 82, 84, 59, 4, 52))
_CHUNKS = (7, 1, 4)
_TOLERANCE = 1e-4
"""Largest difference, as a share of the logits' spread, that rounding in float32 may make."""

_SMALL = {
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "sliding_window": 5,
    "attention_chunk_size": 5,
}
"""Sizes that do not matter to slicing; windows become so small that the prompts pass them."""


def check_architecture(config: PreTrainedConfig) -> Siblings:
    """Which linear layers of this architecture may be one (see `find_siblings`), none if that changes
    anything. Raises `ModelError` unless a model of this configuration can be cut into stages.
    """
    try:
        tiny = json.dumps(shrink(config), sort_keys=True, default=str)
    except AttributeError as error:
        raise ModelError(
            f"{config.model_type} is not a transformer decoder with one kind of head: not supported"
        ) from error
    return _check(tiny)


def shrink(config: PreTrainedConfig) -> dict[str, Any]:
    """The arguments of a tiny configuration: the same switches and head size, a few layers of each kind."""
    small: dict[str, Any] = config.to_dict()
    layers = config.num_hidden_layers
    kinds = small.get("layer_types") or ()
    kept = min(layers, max(4, *(kinds.index(kind) + 1 for kind in set(kinds)), 0))
    for name, value in small.items():
        if isinstance(value, list) and len(value) == layers:
            small[name] = value[:kept]
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    few = 2 if kv_heads == heads else 4
    small |= {name: size for name, size in _SMALL.items() if small.get(name)}
    small |= {
        config.attribute_map.get(name, name): value
        for name, value in {
            "num_hidden_layers": kept,
            "num_attention_heads": few,
            "hidden_size": few * head_dim,
            "vocab_size": _VOCABULARY,
        }.items()
    }
    if "num_key_value_heads" in small:
        small["num_key_value_heads"] = 1 if kv_heads == 1 else 2
    return small | {"dtype": "float32", "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


@lru_cache(maxsize=8)
@torch.inference_mode()
def _check(arguments: str) -> Siblings:
    values = json.loads(arguments)
    kind = values["model_type"]
    try:
        whole = _whole(values)
        layers = decoder_layers(whole)
        siblings = find_siblings(layers, lambda: whole(torch.tensor([_PROMPTS[0]])))
        expected = [whole(torch.tensor([prompt])).logits[0] for prompt in _PROMPTS]
        if siblings and _equal(expected, _serve(_halves(values, whole, siblings))):
            return siblings
        same = _equal(expected, _serve(_halves(values, whole, frozenset())))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"{kind} models cannot be cut into stages ({reason}): choose another model"
        ) from error
    if not same:
        raise ModelError(f"{kind} models do not compute the same when cut into stages: choose another model")
    return frozenset()


def _equal(expected: list[Tensor], actual: list[Tensor]) -> bool:
    return all(
        torch.allclose(want, got, rtol=0, atol=_TOLERANCE * float(want.std()))
        for want, got in zip(expected, actual, strict=True)
    )


def _whole(values: dict[str, Any]) -> Any:
    """The whole tiny model with random weights, as transformers runs it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        auto: Any = AutoModelForCausalLM
        whole = auto.from_config(AutoConfig.for_model(**values), attn_implementation="eager").eval()
        for parameter in whole.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return whole


def _halves(values: dict[str, Any], whole: Any, siblings: Siblings) -> list[_Half]:
    """The same model cut in two."""
    weights = whole.state_dict()
    layers = whole.config.num_hidden_layers
    halves = []
    for start, end in ((0, layers // 2), (layers // 2, layers)):
        if start < end:
            # Two models: neither half can have anything of the other.
            model = build_model(AutoConfig.for_model(**values), torch.float32)
            sliced = SlicedModel(model, torch.device("cpu"), siblings=siblings)
            for name in sliced.missing(start, end):
                sliced.put(name, weights[name])
            halves.append((Stage(sliced, dtype="float32", device="cpu"), start, end))
    return halves


def _serve(halves: list[_Half]) -> list[Tensor]:
    """Logits of both prompts, prefilled in uneven chunks side by side."""
    caches = [private_caches([16 for _ in _PROMPTS]) for _ in halves]
    logits: list[list[Tensor]] = [[] for _ in _PROMPTS]
    position = 0
    for size in _CHUNKS:
        chunks = [torch.tensor(prompt[position : position + size]) for prompt in _PROMPTS]
        present = [index for index, chunk in enumerate(chunks) if len(chunk)]
        hidden = torch.cat([chunks[index] for index in present])
        for (stage, start, end), own in zip(halves, caches, strict=True):
            segments = [Segment(own[index], position, len(chunks[index])) for index in present]
            hidden = stage.forward(segments, hidden, start, end)
        parts = torch.split(halves[-1][0].logits(hidden), [len(chunks[index]) for index in present])
        for index, part in zip(present, parts, strict=True):
            logits[index].append(part)
        position += size
    return [torch.cat(parts) for parts in logits]
