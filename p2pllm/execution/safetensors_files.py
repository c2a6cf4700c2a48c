"""Hugging Face model files: ``config.json`` and one or more safetensors files, here or on the hub.

A safetensors file is an 8-byte length, a JSON table of (type, shape, byte range) and the raw tensors, so any
tensor can be had by its byte range alone. Where the bytes come from is the business of a `Files`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from p2pllm.errors import ModelError
from p2pllm.execution.checkpoint import Checkpoint, TensorInfo, role_of

__all__ = ["Files", "LocalFiles", "SafetensorsCheckpoint"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MAX_HEADER = 100 << 20
_DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "U8": "u1",
    "BOOL": "?",
}
_VOLATILE = ("_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache")
"""Configuration entries that tools rewrite without changing the model."""


class Files(Protocol):
    """Where a model's files are."""

    def text(self, name: str) -> str | None:
        """A small file's text, or None if the model has no such file."""

    def ranges(self, wanted: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Parts of files, each (file, first byte, length); past the end of its file it is shorter."""

    def is_here(self, name: str) -> bool:
        """Whether the whole file is on this machine."""

    def path(self, name: str) -> Path:
        """The whole file on this machine, brought here if need be."""

    def fetch(self, name: str, received: Callable[[int], None]) -> Path:
        """Bring a file here that is not; ``received`` hears how many bytes have come, again and again."""

    def directory(self) -> Path:
        """A local directory with the configuration and tokenizer files."""


@dataclass(frozen=True, slots=True)
class LocalFiles:
    """Files in a directory of this machine."""

    root: Path

    def text(self, name: str) -> str | None:
        """A small file's text, or None if there is none."""
        path = self.root / name
        return path.read_text("utf-8", errors="replace") if path.is_file() else None

    def ranges(self, wanted: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Parts of files."""
        parts = []
        for name, start, length in wanted:
            with self.path(name).open("rb") as file:
                file.seek(start)
                parts.append(file.read(length))
        return parts

    def is_here(self, name: str) -> bool:
        """Whether the file exists."""
        return (self.root / name).is_file()

    def path(self, name: str) -> Path:
        """The file's path; raises `ModelError` if it is missing."""
        path = self.root / name
        if not self.is_here(name):
            raise ModelError(f"{path} is missing: download the model again")
        return path

    def fetch(self, name: str, received: Callable[[int], None]) -> Path:  # noqa: ARG002
        """Nowhere to bring it from: raises `ModelError`."""
        return self.path(name)

    def directory(self) -> Path:
        """The directory itself."""
        return self.root


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a tensor lies."""

    file: str
    start: int
    size: int


class SafetensorsCheckpoint(Checkpoint):
    """A model in Hugging Face's layout."""

    kind: Literal["gguf", "safetensors"] = "safetensors"

    def __init__(self, files: Files, name: str) -> None:
        """Read configuration and headers; raises `ModelError` if they are missing or malformed."""
        self.files = files
        self.name = name
        self.config = self._json("config.json")
        if quantization := self.config.get("quantization_config"):
            method = quantization.get("quant_method") if isinstance(quantization, dict) else None
            raise ModelError(
                f"{name} is stored as {method or 'quantized'}: use the unquantized model or a GGUF file"
            )
        decoder = self.config.get("text_config", self.config)
        if not isinstance(decoder, dict):
            raise ModelError(f"text_config of {name} is not an object: download it again")
        self.layers = _first(decoder, "num_hidden_layers", "n_layer", "num_layers")
        self.hidden = _first(decoder, "hidden_size", "n_embd", "d_model")
        self.vocabulary = _first(decoder, "vocab_size")
        self.context = _first(decoder, "max_position_embeddings", "n_positions", "n_ctx")
        heads = _first(decoder, "num_attention_heads", "n_head")
        kv_heads = _first(decoder | {"heads": heads}, "num_key_value_heads", "heads")
        head_dim = _first(decoder | {"whole": self.hidden // heads}, "head_dim", "whole")
        self.kv_width = 2 * kv_heads * head_dim

        self._stored: dict[str, _Stored] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._read_headers()
        has_head = any(info.role == "head" for info in self.tensors.values())
        self.tied = not has_head

    def read(self, name: str) -> npt.NDArray[Any]:
        """One tensor as stored."""
        info, stored = self.tensors[name], self._stored[name]
        dtype = _DTYPES.get(info.dtype)
        if dtype is None:
            raise ModelError(
                f"{name} of {self.name} is stored as {info.dtype}: use the unquantized model or a GGUF file"
            )
        values = np.fromfile(self.files.path(stored.file), dtype, info.elements, offset=stored.start)
        if values.size != info.elements:
            raise ModelError(f"{stored.file} of {self.name} was cut short: download it again")
        return values.reshape(info.shape)

    def directory(self) -> Path | None:
        """Where transformers finds configuration and tokenizer."""
        return self.files.directory()

    def fetch(self, names: Sequence[str], progress: Callable[[int, int], None]) -> int:
        """Bring the files that hold these tensors here, if they are not; other files are never touched."""
        sizes: dict[str, int] = {}
        for stored in self._stored.values():
            sizes[stored.file] = sizes.get(stored.file, 0) + stored.size
        wanted = sorted({self._stored[name].file for name in names})
        missing = [file for file in wanted if not self.files.is_here(file)]
        done, total = 0, sum(sizes[file] for file in missing)
        for file in missing:
            came = 0

            def received(count: int, before: int = done, size: int = sizes[file]) -> None:
                nonlocal came
                came += count
                progress(before + min(came, size), total)

            self.files.fetch(file, received)
            done += sizes[file]
            progress(done, total)
        return total

    def _heads(self, size: int) -> Mapping[str, bytes]:
        wanted = [(stored.file, stored.start, min(size, stored.size)) for stored in self._stored.values()]
        return dict(zip(self._stored, self.files.ranges(wanted), strict=True))

    def _canonical_config(self) -> Mapping[str, Any]:
        return {key: value for key, value in self.config.items() if key not in _VOLATILE}

    def _json(self, name: str) -> dict[str, Any]:
        text = self.files.text(name)
        if text is None:
            raise ModelError(f"{self.name} has no {name}: it is not a Hugging Face model")
        try:
            value = json.loads(text)
        except ValueError as error:
            raise ModelError(f"{name} of {self.name} is not JSON: download it again") from error
        if not isinstance(value, dict):
            raise ModelError(f"{name} of {self.name} is not a JSON object: download it again")
        return value

    def _read_headers(self) -> None:
        names = [_SINGLE]
        if self.files.text(_INDEX) is not None:
            weight_map = self._json(_INDEX).get("weight_map")
            if not isinstance(weight_map, dict) or not all(
                isinstance(file, str) for file in weight_map.values()
            ):
                raise ModelError(f"{_INDEX} of {self.name} has no weight map: download it again")
            names = sorted(set(weight_map.values()))
        lengths = [
            _header_length(raw, name)
            for raw, name in zip(self.files.ranges([(n, 0, 8) for n in names]), names, strict=True)
        ]
        headers = self.files.ranges([(name, 8, length) for name, length in zip(names, lengths, strict=True)])
        for name, length, header in zip(names, lengths, headers, strict=True):
            try:
                self._add(name, 8 + length, json.loads(header))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ModelError(
                    f"{name} of {self.name} is not a safetensors file: download it again"
                ) from error

    def _add(self, file: str, data_start: int, table: dict[str, Any]) -> None:
        for name, entry in table.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            shape = tuple(int(size) for size in entry["shape"])
            role, layer = role_of(name)
            self.tensors[name] = TensorInfo(name, entry["dtype"], shape, role, layer)
            self._stored[name] = _Stored(file, data_start + begin, end - begin)


def _header_length(raw: bytes, name: str) -> int:
    length = struct.unpack("<Q", raw)[0] if len(raw) == 8 else 0
    if not 0 < length <= _MAX_HEADER:
        raise ModelError(f"{name} is not a safetensors file: download the model again")
    return int(length)


def _first(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and value > 0:
            return value
    raise ModelError(f"config.json names no {names[0]}: this kind of model is not supported")
