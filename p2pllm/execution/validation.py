"""What a stage accepts from entries and other stages, checked before anything is reserved or queued."""

from __future__ import annotations

import math
from collections.abc import Sequence

from p2pllm.errors import RequestError
from p2pllm.execution.blocks import BLOCK_TOKENS
from p2pllm.execution.checkpoint import Checkpoint
from p2pllm.execution.prefix import HASH_BYTES
from p2pllm.execution.types import DTYPES, Activation, SamplingParams

__all__ = ["check_hidden", "check_prefix", "check_sampling", "check_tokens"]


def check_sampling(params: SamplingParams) -> None:
    """Raise `RequestError` unless one can sample with these."""
    is_temperature = math.isfinite(params.temperature) and params.temperature >= 0
    if not is_temperature or not 0 < params.top_p <= 1 or params.top_k < 0:
        raise RequestError(f"temperature ≥ 0, 0 < top_p ≤ 1 and top_k ≥ 0 are wanted, not {params}")


def check_prefix(checkpoint: Checkpoint, prefix: bytes) -> None:
    """Raise `RequestError` unless these are names of blocks, and no more than a session can have."""
    most = checkpoint.context // BLOCK_TOKENS * HASH_BYTES
    if len(prefix) % HASH_BYTES or len(prefix) > most:
        raise RequestError(f"a prefix has {HASH_BYTES} bytes per block, {most} at most, not {len(prefix)}")


def check_tokens(checkpoint: Checkpoint, inputs: Sequence[int] | Activation) -> int:
    """The number of token ids; raises `RequestError` if they are none, or not the model's."""
    if isinstance(inputs, Activation):
        raise RequestError("layer 0 takes token ids, not hidden states")
    if not inputs or not all(0 <= token < checkpoint.vocabulary for token in inputs):
        raise RequestError(f"token ids must be one or more of 0 to {checkpoint.vocabulary - 1}")
    return len(inputs)


def check_hidden(checkpoint: Checkpoint, inputs: Sequence[int] | Activation) -> int:
    """The number of rows of hidden states; raises `RequestError` if type, shape and size are not right."""
    if not isinstance(inputs, Activation):
        raise RequestError("layers after the first take hidden states, not token ids")
    size = DTYPES.get(inputs.dtype)
    rows = inputs.shape[0] if len(inputs.shape) == 2 else 0
    if size is None or rows < 1 or inputs.shape[1] != checkpoint.hidden:
        raise RequestError(
            f"hidden states must be (rows, {checkpoint.hidden}), not {inputs.dtype} {inputs.shape}"
        )
    if len(inputs.data) != rows * checkpoint.hidden * size:
        raise RequestError(
            f"hidden states {inputs.dtype} {inputs.shape} do not have {len(inputs.data)} bytes"
        )
    return rows
