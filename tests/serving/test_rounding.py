"""When hidden states are rounded, and that the same ones are when they are sent again."""

from __future__ import annotations

import struct
from collections import defaultdict
from contextlib import aclosing
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.wires import GREEDY, A, B, C, D, Wires, chain

from p2pllm.errors import FrameError
from p2pllm.execution import Activation
from p2pllm.serving.entry.generation import Generation
from p2pllm.serving.stage.rounding import Rounding, received, rounded
from p2pllm.transport import Hidden


def hidden(rows: int) -> Activation:
    return Activation("bfloat16", (rows, 500), bytes(rows * 1000))


@pytest.mark.parametrize(
    ("rows", "upload", "compute_s", "is_due"),
    [
        (50, 1e6, 0.049, True),  # 50 ms on the way
        (50, 1e6, 0.051, False),
        (50, 1e5, 0.051, True),
        (50, 0.0, 0.001, False),  # not known
        (50, float("inf"), 0.0, False),
        (1, 1e3, 0.001, False),  # decoding
        (2, 1e3, 0.001, True),
    ],
)
def test_chunks_are_rounded_that_take_longer_on_their_way_than_to_compute(
    rows: int, upload: float, compute_s: float, is_due: bool
) -> None:
    rounding = Rounding()
    assert rounding.decide(10, hidden(rows), upload=upload, compute_s=compute_s) is is_due
    assert list(rounding.parts(10, 10 + rows)) == [(10, 10 + rows, is_due)]


@settings(derandomize=True, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9), st.booleans()), max_size=30),
    st.integers(0, 60),
    st.integers(1, 60),
)
def test_what_was_rounded_is_known(sends: list[tuple[int, int, bool]], start: int, count: int) -> None:
    """Against a list with an entry for each token. Each send goes back a little, or does not."""
    rounding, told = Rounding(), []
    for back, rows, is_slow in sends:
        position = max(0, len(told) - back) if back > 10 else len(told)
        is_due = rounding.decide(position, hidden(rows), upload=1.0 if is_slow else 0.0, compute_s=1.0)
        assert is_due == (is_slow and rows > 1)
        told[position:] = [is_due] * rows
    told += [False] * (start + count)
    parts = list(rounding.parts(start, start + count))
    assert [flag for begin, end, flag in parts for _ in range(begin, end)] == told[start : start + count]
    assert (parts[0][0], parts[-1][1]) == (start, start + count)
    for one, after in pairwise(parts):
        assert one[1] == after[0]
        assert one[2] != after[2]


async def test_what_arrives_is_what_the_executor_takes() -> None:
    sent = Activation("float32", (2, 2), struct.pack("<4f", 127.0, 3.4, 0.0, 0.0))
    assert await received(sent) is sent
    assert await received(await rounded(sent)) == Activation(
        "float32", (2, 2), struct.pack("<4f", 127.0, 3.0, 0.0, 0.0)
    )
    assert len((await rounded(sent)).data) == 2 * (4 + 2)
    with pytest.raises(FrameError):
        await rounded(Activation("float32", (1, 1), struct.pack("<f", float("nan"))))


async def test_a_stage_that_is_replaced_is_told_the_same_numbers() -> None:
    """All links are slow, so what A sends is rounded where it is more than a row, now and when B is lost."""
    network = Wires({A: (0, 3), B: (3, 6), C: (3, 6), D: (0, 1)})
    for stages in network.stages.values():
        stages._duty._upload = lambda *_: 1.0
    generator = network.entry(D, chain((A, 0, 3), (B, 3, 6)), chain((A, 0, 3), (C, 3, 6)))
    prompt, tokens = [*range(1, 21)], []
    async with (
        network.running(),
        aclosing(generator.generate(Generation(tuple(prompt), GREEDY, 8))) as stream,
    ):
        async for event in stream:
            tokens.append(event.token)
            if len(tokens) == 3:
                network.kill(B)
    assert len(tokens) == 8
    sent: dict[int, dict[int, tuple[str, bytes]]] = defaultdict(dict)
    for _, _, it in network.sent:
        if isinstance(it, Hidden):
            numbers = (await received(Activation(it.dtype, it.shape, it.data))).data
            for row in range(it.shape[0]):
                sent[it.generation][it.position + row] = it.dtype, numbers[4 * row : 4 * row + 4]
    assert {at: dtype for at, (dtype, _) in sent[0].items() if at < 22} == {
        at: "int8" if at < 20 else "float32" for at in range(22)
    }
    last = sent[max(sent)]
    assert max(sent) > 0
    assert {at: last[at] for at in range(22)} == {at: sent[0][at] for at in range(22)}
