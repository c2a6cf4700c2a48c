"""GGUF files of several architectures, written by the `gguf` package, as transformers reads them."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from p2pllm.errors import ModelError
from p2pllm.execution import ChatTokenizer, open_checkpoint

from .conftest import Chain, load_slice

HIDDEN, HEADS, KV_HEADS, DIM, INNER, EXPERTS, VOCABULARY, LAYERS = 64, 4, 2, 16, 96, 4, 90, 3
EXPERT_INNER = 768  # the only size that transformers knows in such a file


def shapes(kind: str, tied: bool) -> dict[str, tuple[int, ...]]:
    """Tensors of a tiny model, under llama.cpp's names."""
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (HIDDEN,),
        "ffn_norm.weight": (HIDDEN,),
        "attn_q.weight": (HEADS * DIM, HIDDEN),
        "attn_k.weight": (KV_HEADS * DIM, HIDDEN),
        "attn_v.weight": (KV_HEADS * DIM, HIDDEN),
        "attn_output.weight": (HIDDEN, HEADS * DIM),
    }
    if kind == "qwen2":
        layer |= {
            "attn_q.bias": (HEADS * DIM,),
            "attn_k.bias": (KV_HEADS * DIM,),
            "attn_v.bias": (KV_HEADS * DIM,),
        }
    if kind in ("qwen3moe", "gemma3"):
        layer |= {"attn_q_norm.weight": (DIM,), "attn_k_norm.weight": (DIM,)}
    if kind == "gemma3":
        layer |= {"post_attention_norm.weight": (HIDDEN,), "post_ffw_norm.weight": (HIDDEN,)}
    if kind == "qwen3moe":
        layer |= {
            "ffn_gate_inp.weight": (EXPERTS, HIDDEN),
            "ffn_down_exps.weight": (EXPERTS, HIDDEN, EXPERT_INNER),
        }
        layer |= {f"ffn_{name}_exps.weight": (EXPERTS, EXPERT_INNER, HIDDEN) for name in ("gate", "up")}
    else:
        layer |= {
            "ffn_down.weight": (HIDDEN, INNER),
            "ffn_gate.weight": (INNER, HIDDEN),
            "ffn_up.weight": (INNER, HIDDEN),
        }
    found = {f"blk.{index}.{name}": shape for index in range(LAYERS) for name, shape in layer.items()}
    found |= {"token_embd.weight": (VOCABULARY, HIDDEN), "output_norm.weight": (HIDDEN,)}
    return found if tied else found | {"output.weight": (VOCABULARY, HIDDEN)}


def write(
    path: Path, kind: str, *, tied: bool = False, quantization: Any = gguf.GGMLQuantizationType.F32
) -> Path:
    """A tiny model with random weights."""
    random = np.random.default_rng(4)
    writer = gguf.GGUFWriter(path, kind)
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    if kind == "qwen3moe":
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(EXPERT_INNER)
    if kind == "gemma3":
        writer.add_sliding_window(6)
    if kind in ("qwen3moe", "gemma3"):
        writer.add_key_length(DIM)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([chr(33 + index) for index in range(VOCABULARY)])
    writer.add_token_merges([])
    for name, shape in shapes(kind, tied).items():
        scale = 1.0 if len(shape) == 1 else shape[-1] ** -0.5
        values = (random.standard_normal(shape) * scale + (len(shape) == 1)).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quantize(values, quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("kind", "tied", "quantization"),
    [
        ("llama", False, "Q8_0"),
        ("llama", True, "Q4_0"),
        ("qwen2", False, "F16"),
        ("qwen3moe", False, "F32"),
        ("gemma3", True, "BF16"),
    ],
)
@torch.inference_mode()
def test_slices_of_a_gguf_file(kind: str, tied: bool, quantization: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", kind, tied=tied, quantization=gguf.GGMLQuantizationType[quantization])
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).eval()
    checkpoint = open_checkpoint(str(path))
    assert (checkpoint.layers, checkpoint.hidden, checkpoint.context, checkpoint.tied) == (
        LAYERS,
        HIDDEN,
        64,
        tied,
    )
    stages = [load_slice(checkpoint, a, b) for a, b in ((0, 1), (1, 3))]
    tokens = [3, 1, 4, 15, 9, 26, 53, 58, 9, 79]
    chain = Chain(stages, sessions=1)
    logits = torch.cat([chain.step({0: tokens[:4]})[0], chain.step({0: tokens[4:]})[0]])
    torch.testing.assert_close(logits, whole(torch.tensor([tokens])).logits[0], atol=1e-4, rtol=1e-4)


def test_architecture_that_transformers_cannot_read(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write(tmp_path / "m.gguf", "plamo")))
    with pytest.raises(ModelError, match="architecture plamo are not supported"):
        load_slice(checkpoint, 0, 1)


def test_tokenizer_that_cannot_be_built(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write(tmp_path / "m.gguf", "llama")))
    checkpoint.config["tokenizer.ggml.model"] = "own"  # type: ignore[index]
    with pytest.raises(ModelError, match="tokenizer of m cannot be built"):
        ChatTokenizer(checkpoint)


def header(entries: bytes = b"", *, version: int = 3, tensors: int = 0, count: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, count) + entries


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGML" + bytes(40),
        header(version=1),
        header(count=1 << 60),
        header(tensors=1 << 60),
        header(struct.pack("<Q", 1 << 62), count=1),
        header(struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, 4, 1 << 60), count=1),
        header(struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, 8, 1 << 60), count=1),
        header(struct.pack("<Q", 1) + b"a" + struct.pack("<I", 99), count=1),
        header(struct.pack("<Q", 1) + b"a" + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000, count=1),
        header(struct.pack("<Q", 1) + b"t" + struct.pack("<I", 1 << 30), tensors=1),
        header(),
    ],
)
def test_not_a_readable_file(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="is not a GGUF file that can be read"):
        open_checkpoint(str(path))


@pytest.mark.parametrize("kept", [0.2, 0.9, 0.999])
def test_cut_short(kept: float, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama")
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(ModelError, match="ends too early"):
        open_checkpoint(str(path))
