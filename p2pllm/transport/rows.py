"""Hidden states for slow links: rounded to a byte for each number, with a scale for each row.

In front are the scales as float32, each the largest magnitude of its row over 127; the numbers follow, as
multiples of these (absmax quantization as in LLM.int8(), Dettmers et al. 2022). The same numbers always give
the same bytes.
"""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import NDArray

from p2pllm.errors import FrameError
from p2pllm.transport.fields import ITEM_BYTES

__all__ = ["ROUNDED", "pack_rows", "packed_bytes", "unpack_rows"]

ROUNDED = "int8"
"""What such hidden states have for their dtype."""

_SCALE = np.dtype("<f4")
_TYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}


def packed_bytes(shape: tuple[int, ...]) -> int:
    """Bytes of packed hidden states (…, hidden) of this shape."""
    *rows, width = shape
    return prod(rows) * (_SCALE.itemsize + width)


def pack_rows(dtype: str, shape: tuple[int, ...], data: bytes) -> bytes:
    """Round hidden states (…, hidden), row-major and little-endian. Each number is then off by at most 1/254
    of the largest magnitude in its row.

    Raises FrameError if the size is not that of the shape, or a number is not finite, or next to it.
    """
    if dtype not in ITEM_BYTES or len(data) != prod(shape) * ITEM_BYTES[dtype]:
        raise FrameError(f"{len(data)} bytes are no {dtype} tensor of shape {list(shape)}")
    numbers = _numbers(dtype, data).reshape(-1, shape[-1])
    with np.errstate(over="ignore", invalid="ignore"):
        scales = np.abs(numbers).max(axis=1, keepdims=True) / np.float32(127)
        if not np.isfinite(scales * np.float32(127)).all():
            raise FrameError("the hidden states hold values that are not finite")
        multiples = numbers / np.where(scales > 0, scales, np.float32(1))
    np.rint(multiples, out=multiples)
    np.clip(multiples, -127, 127, out=multiples)
    return b"".join((scales.astype(_SCALE).tobytes(), multiples.astype(np.int8).tobytes()))


def unpack_rows(shape: tuple[int, ...], data: bytes) -> bytes:
    """Packed hidden states of this shape as float32, row-major and little-endian.

    Raises FrameError if their size is not that of the shape, or a number is not finite.
    """
    if len(data) != packed_bytes(shape):
        raise FrameError(f"{len(data)} bytes are no packed tensor of shape {list(shape)}")
    rows = prod(shape[:-1])
    scales = np.frombuffer(data, _SCALE, rows).reshape(-1, 1)
    multiples = np.frombuffer(data, np.int8, offset=scales.nbytes).reshape(rows, -1)
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = multiples * scales
    if not np.isfinite(numbers).all():
        raise FrameError("the hidden states hold values that are not finite")
    return numbers.astype("<f4", copy=False).tobytes()


def _numbers(dtype: str, data: bytes) -> NDArray[np.float32]:
    raw = np.frombuffer(data, _TYPES[dtype])
    if dtype == "bfloat16":  # the upper half of a float32
        return (raw.astype("<u4") << 16).view("<f4")
    return raw.astype("<f4", copy=False)
