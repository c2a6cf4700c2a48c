"""Model files as the swarm sees them: what tensors there are, which layer each belongs to, and the
fingerprint.

Nothing here needs torch, and opening a checkpoint reads headers only. The kinds of files live in `gguf_file`,
`safetensors_files` and `hub`; `sources` picks one.
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy.typing as npt

from p2pllm.execution.types import DTYPES

__all__ = ["Checkpoint", "Role", "TensorInfo", "role_of"]

Role = Literal["layer", "embed", "head", "norm"]

FINGERPRINT_HEAD = 64
"""Bytes of each tensor in the fingerprint: fine-tunes share configuration, names and shapes, not values."""

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blk|block|blocks)\.(\d+)\.")
_EMBED = re.compile(r"embed_tokens|token_embd|word_embeddings|position_embd|embed_in|(?:^|\.)w[tp]e\.")
_HEAD = re.compile(r"lm_head|embed_out|^output\.(?:weight|bias)$")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor. ``dtype`` is the file's own word; ``layer`` is None unless ``role`` is "layer"."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: Role
    layer: int | None

    @property
    def elements(self) -> int:
        """How many numbers the tensor holds."""
        return prod(self.shape)


def role_of(name: str) -> tuple[Role, int | None]:
    """What a tensor of this name is for, and the decoder layer it belongs to, if any."""
    if match := _LAYER.search(name):
        return "layer", int(match.group(1))
    if _EMBED.search(name):
        return "embed", None
    if _HEAD.search(name):
        return "head", None
    return "norm", None


class Checkpoint(ABC):
    """A model's files, opened but not read.

    ``kind`` is the layout ("gguf" or "safetensors"), ``config`` the model's own description of itself: the
    parsed ``config.json``, or the metadata of a GGUF file.
    """

    kind: Literal["gguf", "safetensors"]
    name: str
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    layers: int
    hidden: int
    vocabulary: int
    context: int
    """The most tokens that a session may have."""
    kv_width: int
    """Numbers that one token leaves in the KV cache of one layer, keys and values together."""
    tied: bool

    @abstractmethod
    def read(self, name: str) -> npt.NDArray[Any]:
        """The values of one tensor, in an array of its own.

        Quantized GGUF tensors come as float32. NumPy has no bfloat16: such a tensor comes as its bits, in
        uint16. Raises `ModelError` if the file is cut short or its type is not one we can compute with.
        """

    @abstractmethod
    def directory(self) -> Path | None:
        """A local directory with configuration and tokenizer files; None if the model is a single file."""

    @abstractmethod
    def _heads(self, size: int) -> Mapping[str, bytes]:
        """The first ``size`` stored bytes of every tensor."""

    @abstractmethod
    def _canonical_config(self) -> Mapping[str, Any]:
        """The part of the configuration that decides what the model computes."""

    @abstractmethod
    def fetch(self, names: Sequence[str], progress: Callable[[int, int], None]) -> int:
        """Bring the files that hold these tensors here, and return how many bytes that took.

        ``progress`` hears (bytes so far, bytes in all of them), again and again.
        """

    @cached_property
    def fingerprint(self) -> str:
        """Names the swarm: 40 hex digits over configuration, tensor names, types, shapes and first bytes."""
        digest = hashlib.sha256()
        digest.update(json.dumps(self._canonical_config(), sort_keys=True, default=str).encode())
        heads = self._heads(FINGERPRINT_HEAD)
        for name in sorted(self.tensors):
            info = self.tensors[name]
            digest.update(json.dumps([name, info.dtype, info.shape]).encode())
            digest.update(heads[name])
        return digest.hexdigest()[:40]

    def layer_bytes(self, dtype: str) -> int:
        """Bytes of the largest decoder layer in ``dtype``."""
        sizes = [0] * self.layers
        for info in self.tensors.values():
            if info.layer is not None and info.layer < self.layers:
                sizes[info.layer] += info.elements
        return max(sizes) * DTYPES[dtype]

    def kv_bytes(self, dtype: str) -> int:
        """Bytes that one token takes in the KV cache of one layer."""
        return self.kv_width * DTYPES[dtype]

    def embed_bytes(self, dtype: str) -> int:
        """Bytes that the first stage holds beyond its layers."""
        return self._role_bytes("embed", dtype)

    def head_bytes(self, dtype: str) -> int:
        """Bytes that the last stage holds beyond its layers; tied embeddings are a copy there."""
        return self._role_bytes("embed" if self.tied else "head", dtype) + self._role_bytes("norm", dtype)

    def _role_bytes(self, role: Role, dtype: str) -> int:
        return sum(info.elements for info in self.tensors.values() if info.role == role) * DTYPES[dtype]
