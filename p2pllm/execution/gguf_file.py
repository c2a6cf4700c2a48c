"""GGUF files: one file with metadata, a tensor table and (mostly quantized) tensors.

The header is parsed here in a fraction of a second (the `gguf` package builds an array object for each of the
hundred thousand strings of a vocabulary); that package still knows the quantizations.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from p2pllm.errors import ModelError
from p2pllm.execution.checkpoint import Checkpoint, TensorInfo, role_of

__all__ = ["GgufCheckpoint"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9
_MAX_DIMENSIONS = 8


@dataclass(frozen=True, slots=True)
class _Stored:
    """A row of the tensor table: the name, shape in torch's order, ggml type, and offset into the data."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


class _Reader:
    """Reads header values off a file, never more than the file holds."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.left = os.fstat(file.fileno()).st_size

    def take(self, size: int) -> bytes:
        if size > self.left:
            raise ValueError("it ends too early")
        self.left -= size
        return self.file.read(size)

    def numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(f"<{code}")))

    def number(self, code: str) -> Any:
        return self.numbers(code)[0]

    def string(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(_SCALARS[kind])
        item, count = self.number("I"), self.number("Q")
        if item in _SCALARS:
            return list(self.numbers(_SCALARS[item], count))
        return [self.value(item) for _ in range(count)]

    def tensor(self) -> _Stored:
        name, dimensions = self.string(), self.number("I")
        if dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name} has {dimensions} dimensions")
        shape = tuple(reversed(self.numbers("Q", dimensions)))
        return _Stored(name, shape, self.number("I"), self.number("Q"))


class GgufCheckpoint(Checkpoint):
    """A GGUF file. ``config`` is its metadata, with every key as the file spells it."""

    kind: Literal["gguf", "safetensors"] = "gguf"

    def __init__(self, path: Path, name: str) -> None:
        """Parse the header of ``path``; raises `ModelError` if it is not a whole, readable GGUF file."""
        self.path = path
        self.name = name
        try:
            with path.open("rb") as file:
                self._parse(file)
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}") from error
        except (struct.error, KeyError, ValueError, OverflowError, MemoryError, RecursionError) as error:
            raise ModelError(
                f"{path} is not a GGUF file that can be read ({error}): download it again"
            ) from error

    def _parse(self, file: BinaryIO) -> None:
        reader = _Reader(file)
        if reader.take(4) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        version, tensor_count, entry_count = reader.number("I"), *reader.numbers("Q", 2)
        if version not in _VERSIONS:
            raise ValueError(f"version {version}, not 2 or 3")
        self.config: dict[str, Any] = {}
        for _ in range(entry_count):
            key = reader.string()
            self.config[key] = reader.value(reader.number("I"))
        table = [reader.tensor() for _ in range(tensor_count)]

        alignment = int(self.config.get("general.alignment", 32))
        self._start = -(-file.tell() // alignment) * alignment
        self._stored = {entry.name: entry for entry in table}
        if any(self._start + entry.offset + self._size(entry) > file.tell() + reader.left for entry in table):
            raise ValueError("it ends too early")

        architecture = self.config["general.architecture"]
        self.layers = int(self.config[f"{architecture}.block_count"])
        self.hidden = int(self.config[f"{architecture}.embedding_length"])
        self.context = int(self.config[f"{architecture}.context_length"])
        heads = int(self.config[f"{architecture}.attention.head_count"])
        # Some architectures name the number of KV heads layer by layer.
        kv_heads = np.max(self.config.get(f"{architecture}.attention.head_count_kv", heads))
        head_dim = int(self.config.get(f"{architecture}.attention.key_length", self.hidden // heads))
        self.kv_width = 2 * int(kv_heads) * head_dim
        self.vocabulary = self._stored["token_embd.weight"].shape[0]
        self.tensors = {entry.name: _info(entry) for entry in table}
        self.tied = "output.weight" not in self.tensors

    def read(self, name: str) -> npt.NDArray[Any]:
        """One tensor, dequantized to float32."""
        from gguf import GGMLQuantizationType, dequantize

        entry = self._stored[name]
        raw = np.frombuffer(self._bytes(entry, self._size(entry)), dtype=np.uint8)
        rows = prod(entry.shape[:-1])
        try:
            values = dequantize(raw.reshape(rows, -1), GGMLQuantizationType(entry.kind))
        except NotImplementedError as error:
            kind = GGMLQuantizationType(entry.kind).name
            raise ModelError(
                f"{self.path} holds {kind} tensors, which cannot be read: choose another quantization"
            ) from error
        return np.require(values.reshape(entry.shape), np.float32, ["C", "W"])

    def fetch(self, names: Sequence[str], progress: Callable[[int, int], None]) -> int:  # noqa: ARG002
        """Nothing to do: the file is here."""
        return 0

    def directory(self) -> Path | None:
        """None: a GGUF file carries its tokenizer in its metadata."""
        return None

    def _heads(self, size: int) -> Mapping[str, bytes]:
        return {
            name: bytes(self._bytes(entry, min(size, self._size(entry))))
            for name, entry in self._stored.items()
        }

    def _canonical_config(self) -> Mapping[str, Any]:
        prefix = f"{self.config['general.architecture']}."
        return {key: value for key, value in self.config.items() if key.startswith(prefix)} | {"kind": prefix}

    def _bytes(self, entry: _Stored, size: int) -> bytearray:
        data = bytearray(size)
        with self.path.open("rb") as file:
            file.seek(self._start + entry.offset)
            if file.readinto(data) != size:
                raise ModelError(f"{self.path} was cut short while in use: download it again")
        return data

    @staticmethod
    def _size(entry: _Stored) -> int:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(entry.kind)]
        return prod(entry.shape) // int(block_elements) * int(block_bytes)


def _info(entry: _Stored) -> TensorInfo:
    from gguf import GGMLQuantizationType

    role, layer = role_of(entry.name)
    return TensorInfo(entry.name, GGMLQuantizationType(entry.kind).name, entry.shape, role, layer)
