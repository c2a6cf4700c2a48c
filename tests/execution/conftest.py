"""What these tests share: the embedded model and tiny ones, and transformers' own runs of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from p2pllm.execution import Checkpoint, open_checkpoint
from p2pllm.execution.attention import Segment
from p2pllm.execution.kv import private_caches
from p2pllm.execution.loader import Loader
from p2pllm.execution.stage import Stage


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint() -> Checkpoint:
    """The embedded model."""
    return open_checkpoint("embedded")


TINY: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 6},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 6},
    "gemma3_text": {"head_dim": 16, "sliding_window": 6},
    "granite": {"embedding_multiplier": 12.0, "logits_scaling": 8.0},
    "gpt_neox": {},
    "gpt2": {"n_positions": 128},
}
"""Small models of unlike architectures, each with what is peculiar to it switched on."""


def tiny_config(kind: str) -> Any:
    """The configuration of a tiny model with four layers."""
    sizes = {
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 100,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    if kind not in ("gpt2", "gpt_neox"):
        sizes["num_key_value_heads"] = 2
    return AutoConfig.for_model(kind, **(sizes | TINY[kind]))


def random_model(config: Any) -> Any:
    """A whole model with random weights that make attention and experts matter, run by transformers alone."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return model


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Makes (directory, whole model) of a tiny random model, once per architecture."""
    made: dict[str, tuple[Path, Any]] = {}

    def make(kind: str) -> tuple[Path, Any]:
        if kind not in made:
            directory = tmp_path_factory.mktemp(kind)
            model = random_model(tiny_config(kind))
            model.save_pretrained(directory)
            made[kind] = directory, model
        return made[kind]

    return make


@dataclass(frozen=True)
class Slice:
    """Layers [start, end) of a stage that may hold more."""

    stage: Stage
    start: int
    end: int


def load_slice(checkpoint: Checkpoint, start: int, end: int, dtype: str = "float32") -> Slice:
    """Layers [start, end) in a stage of their own."""
    loader = Loader(checkpoint, dtype=dtype, device="cpu")
    loader.load(start, end)
    return Slice(loader.stage, start, end)


class Chain:
    """Slices one after the other, for several sessions in one batch."""

    def __init__(self, stages: Sequence[Slice], sessions: int, tokens: int = 256) -> None:
        self.stages = stages
        self.caches = [private_caches([tokens] * sessions) for _ in stages]
        self.lengths = [0] * sessions

    def step(self, rows: dict[int, Sequence[int]]) -> dict[int, Tensor]:
        """Run token ids of some sessions in one batch; returns the logits of all their rows."""
        hidden = torch.tensor([token for tokens in rows.values() for token in tokens])
        for stage, caches in zip(self.stages, self.caches, strict=True):
            segments = [Segment(caches[i], self.lengths[i], len(tokens)) for i, tokens in rows.items()]
            hidden = stage.stage.forward(segments, hidden, stage.start, stage.end)
        for i, tokens in rows.items():
            self.lengths[i] += len(tokens)
        logits = self.stages[-1].stage.logits(hidden)
        return dict(zip(rows, torch.split(logits, [len(tokens) for tokens in rows.values()]), strict=True))
