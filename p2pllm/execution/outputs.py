"""What a stage sent, kept in blocks beside its keys and values, so that it can be sent once more.

For the thread that takes steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from p2pllm.errors import SessionError
from p2pllm.execution.blocks import slots_of
from p2pllm.execution.kv import SessionCache
from p2pllm.execution.layout import target_of
from p2pllm.execution.types import Activation
from p2pllm.execution.work import Work

__all__ = ["keep_outputs", "read_outputs", "to_activation"]


def keep_outputs(works: Sequence[Work], hidden: Tensor, layer: int) -> None:
    """Keep ``hidden`` (tokens, hidden), the rows of ``works``, in the blocks under this number of a layer."""
    spans = [(it.tables[None], it.position, it.position + it.count) for it in works]
    works[0].cache.store.write(layer, target_of(spans, hidden), hidden.unsqueeze(0))


@torch.inference_mode()
def read_outputs(
    cache: SessionCache, table: NDArray[np.int64], layer: int, start: int, end: int
) -> Activation:
    """What was kept of tokens [start, end); raises `SessionError` if there are not so many."""
    cache.catch_up()
    if not 0 <= start < end <= cache.length:
        raise SessionError(f"outputs {start}:{end} are not kept here, but those of {cache.length} tokens")
    return to_activation(cache.store.read(layer, torch.from_numpy(slots_of(table, start, end)))[0].cpu())


def to_activation(hidden: Tensor) -> Activation:
    """Hidden states (tokens, hidden) on the CPU as they are sent."""
    dtype = str(hidden.dtype).removeprefix("torch.")
    return Activation(dtype, tuple(hidden.shape), hidden.contiguous().view(torch.uint8).numpy().tobytes())
