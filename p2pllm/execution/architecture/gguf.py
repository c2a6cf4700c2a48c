"""What a GGUF file says about a model, in transformers' terms. The files use llama.cpp's names throughout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["gguf_arguments", "gguf_tokenizer"]

_SPELLED = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
_TEXT_ONLY = {"gemma3": "gemma3_text"}


def gguf_arguments(metadata: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """Arguments of the model's configuration class; raises `ValueError` for files of another kind."""
    from transformers.integrations import ggml

    mapping: Any = ggml.GGUF_CONFIG_MAPPING
    defaults: Any = ggml.GGUF_CONFIG_DEFAULTS_MAPPING
    architecture = metadata["general.architecture"]
    # llama.cpp stores Mistral as Llama.
    is_mistral = architecture == "llama" and "mistral" in str(metadata.get("general.name", "")).lower()
    kind = "mistral" if is_mistral else _SPELLED.get(architecture, architecture)
    if kind not in mapping:
        raise ValueError(f"GGUF files of architecture {architecture} are not supported")
    values = dict(defaults.get(kind, {}))
    for prefix, names in ((architecture, mapping[kind]), ("tokenizer", mapping["tokenizer"])):
        for key, name in names.items():
            if name is not None and f"{prefix}.{key}" in metadata:
                values[name] = metadata[f"{prefix}.{key}"]
    if f"{architecture}.expert_feed_forward_length" in metadata:
        values.setdefault("moe_intermediate_size", metadata[f"{architecture}.expert_feed_forward_length"])
    values.setdefault("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ())))
    return values | {"model_type": _TEXT_ONLY.get(kind, kind), "tie_word_embeddings": tied}


def gguf_tokenizer(metadata: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """The same tokenizer that transformers builds from the file, without reading the file again."""
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations import gguf

    renames: Any = gguf.GGUF_TOKENIZER_MAPPING  # type: ignore[attr-defined]
    convert: Any = gguf.convert_gguf_tokenizer  # type: ignore[attr-defined]
    tokenizer_class: Any = PreTrainedTokenizerFast

    def group(name: str) -> dict[str, Any]:
        names = renames[name].items()
        return {new: metadata[f"tokenizer.{old}"] for old, new in names if f"tokenizer.{old}" in metadata}

    def token(kind: str) -> str | None:
        index = metadata.get(f"tokenizer.ggml.{kind}_token_id")
        return None if index is None else str(metadata["tokenizer.ggml.tokens"][index])

    description, options = group("tokenizer"), group("tokenizer_config")
    backend, _ = convert(metadata["general.architecture"], description)
    if description["tokenizer_type"] == "llama":
        options.setdefault("add_bos_token", True)  # llama.cpp's default for SentencePiece
    tokenizer: PreTrainedTokenizerBase = tokenizer_class(
        tokenizer_object=backend,
        bos_token=token("bos"),
        eos_token=token("eos"),
        unk_token=token("unknown"),
        pad_token=token("padding"),
        **options,
    )
    return tokenizer
