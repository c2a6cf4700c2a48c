"""Other architectures: slices of tiny random models against transformers running the whole model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from p2pllm.errors import ModelError
from p2pllm.execution import open_checkpoint
from p2pllm.execution.loader import Loader
from p2pllm.execution.selfcheck import check_architecture

from .conftest import TINY, Chain, Slice, load_slice

SUPPORTED = [
    *("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma", "gemma2", "gemma3_text", "phi3"),
    *(
        "gpt_oss",
        "olmo2",
        "granite",
        "smollm3",
        "gpt_neox",
        "glm4",
        "gpt2",
        "cohere",
        "deepseek_v3",
        "starcoder2",
    ),
]
UNSUPPORTED = ["bloom", "falcon", "opt", "mamba", "stablelm"]
PROMPTS = ([5, 17, 42, 8, 99, 23, 61, 3, 77, 12, 50, 31], [9, 88, 2, 71, 64, 33, 15])


@pytest.mark.parametrize("kind", TINY)
@torch.inference_mode()
def test_saved_model_in_slices(kind: str, saved_model: Callable[[str], tuple[Path, Any]]) -> None:
    directory, whole = saved_model(kind)
    checkpoint = open_checkpoint(str(directory))
    stages = [load_slice(checkpoint, a, b) for a, b in ((0, 1), (1, 3), (3, 4))]
    chain = Chain(stages, sessions=2)
    parts = [
        chain.step({0: PROMPTS[0][:7], 1: PROMPTS[1][:3]}),
        chain.step({1: PROMPTS[1][3:6], 0: PROMPTS[0][7:8]}),
        chain.step({0: PROMPTS[0][8:], 1: PROMPTS[1][6:]}),
    ]
    for session, tokens in enumerate(PROMPTS):
        logits = torch.cat([part[session] for part in parts])
        torch.testing.assert_close(logits, whole(torch.tensor([tokens])).logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", TINY)
@torch.inference_mode()
def test_layers_that_come_and_go_in_one_stage(
    kind: str, saved_model: Callable[[str], tuple[Path, Any]]
) -> None:
    directory, whole = saved_model(kind)
    loader = Loader(open_checkpoint(str(directory)), dtype="float32", device="cpu")

    def logits() -> torch.Tensor:
        chain = Chain([Slice(loader.stage, a, b) for a, b in ((0, 1), (1, 3), (3, 4))], sessions=1)
        return torch.cat([chain.step({0: PROMPTS[0][a:b]})[0] for a, b in ((0, 7), (7, 8), (8, 12))])

    loader.load(2, 4)
    loader.load(0, 2)
    first = logits()
    torch.testing.assert_close(first, whole(torch.tensor([PROMPTS[0]])).logits[0], atol=1e-4, rtol=1e-4)
    loader.stage.retain({1, 3})
    with pytest.raises((RuntimeError, ModelError)):
        logits()
    loader.load(0, 3)
    assert torch.equal(logits(), first)


@pytest.mark.parametrize("kind", SUPPORTED)
def test_self_check_passes(kind: str) -> None:
    check_architecture(AutoConfig.for_model(kind))


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_self_check_refuses_by_name(kind: str) -> None:
    with pytest.raises(ModelError, match=rf"(?i){kind}"):
        check_architecture(AutoConfig.for_model(kind))


def test_self_check_refuses_layers_with_a_state_of_their_own() -> None:
    """Convolutions remember tokens outside of the KV cache: in chunks they compute something else."""
    config = AutoConfig.for_model("lfm2", layer_types=["conv", "full_attention"] * 2, num_hidden_layers=4)
    with pytest.raises(ModelError, match="lfm2 models do not compute the same"):
        check_architecture(config)


def test_self_check_notices_a_wrong_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """With windows ignored, a model that has them comes out different."""
    from p2pllm.execution import attention

    right = attention.make_layout
    monkeypatch.setattr(
        attention, "make_layout", lambda segments, _, *rest, **more: right(segments, None, *rest, **more)
    )
    config = AutoConfig.for_model("mistral", sliding_window=4096, num_hidden_layers=3)
    with pytest.raises(ModelError, match="mistral models do not compute the same"):
        check_architecture(config)


def test_dynamic_rotary_scaling_is_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ModelError, match="dynamic rotary scaling"):
        check_architecture(AutoConfig.for_model("llama", rope_parameters=rope))


def table() -> str:
    """The README's table: what the self-check says of each architecture."""
    rows = ["| transformers' `model_type` | weights read as one |", "|---|---|"]
    for kind in sorted(SUPPORTED):
        groups = sorted(check_architecture(AutoConfig.for_model(kind)))
        spelled = (" + ".join(f"`{name.rpartition('.')[2]}`" for name in group) for group in groups)
        fused = "; ".join(dict.fromkeys(spelled))
        rows.append(f"| {kind} | {fused or '–'} |")
    refused = ", ".join(sorted([*UNSUPPORTED, "lfm2"]))
    return "\n".join([*rows, "", f"Refused by name, as they do not come out equal in slices: {refused}."])


def test_table_in_the_readme_is_up_to_date() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    _, _, rest = readme.partition("<!-- architectures -->\n")
    written, end, _ = rest.partition("\n<!-- /architectures -->")
    assert end
    assert written == table(), "put table() between the README's two comments"
