"""Rounded rows: near what they were, the same each time, and nothing not finite or of another size."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from p2pllm.errors import FrameError
from p2pllm.transport import ROUNDED, Hidden, decode, encode, pack_rows, unpack_rows
from p2pllm.transport.rows import packed_bytes

tensors = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 6), st.integers(1, 20)),
    elements=st.floats(-(2.0**126), 2.0**126, width=32) | st.floats(-10, 10, width=32),
)


def as_sent(numbers: NDArray[np.float32], dtype: str) -> tuple[NDArray[np.float32], bytes]:
    """Numbers that are of this type, near the given ones, and their bytes."""
    if dtype == "float32":
        return numbers, numbers.tobytes()
    if dtype == "float16":
        halves = numbers.clip(-60000, 60000).astype("<f2")
        return halves.astype("<f4"), halves.tobytes()
    bits = numbers.view("<u4") & 0xFFFF0000
    return bits.view("<f4"), (bits >> 16).astype("<u2").tobytes()


@settings(derandomize=True, deadline=None)
@given(tensors, st.sampled_from(["bfloat16", "float16", "float32"]))
def test_no_number_is_off_by_more_than_half_a_step(given_numbers: NDArray[np.float32], dtype: str) -> None:
    numbers, data = as_sent(given_numbers, dtype)
    packed = pack_rows(dtype, numbers.shape, data)
    assert len(packed) == packed_bytes(numbers.shape)
    found = np.frombuffer(unpack_rows(numbers.shape, packed), "<f4").reshape(numbers.shape)
    largest = np.abs(numbers).max(axis=1, keepdims=True).astype("f8")
    # What float32 adds: in its quotients, and where its numbers end.
    assert (np.abs(numbers.astype("f8") - found) <= largest / 254 * (1 + 1e-4) + 2e-43).all()
    assert pack_rows("float32", numbers.shape, numbers.tobytes()) == packed


def test_by_hand() -> None:
    """Steps of 2 and of 0: a float32 for each row, then a byte for each number."""
    data = struct.pack("<6f", 254.0, -1.1, 0.9, 0.0, -0.0, 0.0)
    packed = pack_rows("float32", (2, 3), data)
    assert packed == struct.pack("<2f6b", 2.0, 0.0, 127, -1, 0, 0, 0, 0)
    assert struct.unpack("<6f", unpack_rows((2, 3), packed)) == (254.0, -2.0, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_is_not_finite_is_refused(value: float, dtype: str) -> None:
    rows = np.array([[1, 2], [value, 0]], "<f4")
    data = rows.astype("<f2").tobytes() if dtype == "float16" else as_sent(rows, dtype)[1]
    with pytest.raises(FrameError, match="not finite"):
        pack_rows(dtype, (2, 2), data)
    with pytest.raises(FrameError, match="not finite"):
        unpack_rows((1, 2), struct.pack("<f2b", value, 1, 0))


@settings(derandomize=True, deadline=None)
@given(st.binary(max_size=40), st.tuples(st.integers(1, 4), st.integers(1, 8)))
def test_any_bytes_give_finite_numbers_or_an_error(data: bytes, shape: tuple[int, int]) -> None:
    try:
        numbers = np.frombuffer(unpack_rows(shape, data), "<f4")
    except FrameError:
        return
    assert len(data) == shape[0] * (shape[1] + 4)
    assert np.isfinite(numbers).all()
    assert numbers.shape == (shape[0] * shape[1],)


def test_sizes_are_those_of_the_shape() -> None:
    for dtype, size in (("float32", 23), ("bfloat16", 13), ("int8", 14), ("float64", 48)):
        with pytest.raises(FrameError, match=r"no .* tensor of shape"):
            pack_rows(dtype, (2, 3), bytes(size))
    with pytest.raises(FrameError, match="no packed tensor"):
        unpack_rows((2**24, 2**24), bytes(14))
    for size in (13, 15, 24):
        with pytest.raises(FrameError, match=r"no int8 tensor of shape \[2, 3\]"):
            Hidden("s", 1, 0, 0, False, ROUNDED, (2, 3), bytes(size))


def test_they_travel_in_a_frame() -> None:
    message = Hidden("s", 1, 0, 7, True, ROUNDED, (2, 3), bytes(range(14)))
    assert decode(encode(message)) == message
