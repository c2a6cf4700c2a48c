"""The block pool against a plain set of (layer, block)."""

from __future__ import annotations

import random

import pytest

from p2pllm.errors import BusyError
from p2pllm.execution.blocks import BlockPool, blocks_for


@pytest.mark.parametrize(("tokens", "layers", "blocks"), [(1, 1, 1), (16, 1, 1), (17, 1, 2), (33, 10, 30)])
def test_blocks(tokens: int, layers: int, blocks: int) -> None:
    assert blocks_for(tokens, layers) == blocks


def test_takes_all_or_nothing() -> None:
    pool = BlockPool(10)
    taken = pool.take([0], 7)
    with pytest.raises(BusyError, match="4 blocks wanted, 3 of 10 free"):
        pool.take([0], 4)
    rest = pool.take([0], 3)
    assert sorted([*taken, *rest]) == list(range(10))
    pool.give([0], taken)
    assert pool.free == 7


def test_a_pool_that_shrinks_gives_nothing_until_it_is_free() -> None:
    pool = BlockPool(10)
    taken = pool.take([0], 7)
    pool.resize(4, 1)
    assert (pool.total, pool.free) == (4, -3)
    with pytest.raises(BusyError, match="1 blocks wanted, 0 of 4 free"):
        pool.take([0], 1)
    pool.give([0], taken[:5])
    pool.take([0], 2)
    pool.resize(6, 1)
    assert (pool.total, pool.free) == (6, 2)


def test_sessions_stay_in_one_piece_while_there_is_space() -> None:
    """Each finds room to grow behind it, though another was opened after it."""
    pool = BlockPool(400, 2)
    first, second = (pool.take([0, 1], 8) for _ in range(2))
    for table in (first, second):
        more = pool.take([0, 1], 16, after=int(table[-1]))
        assert more.tolist() == list(range(table[-1] + 1, table[-1] + 17))


def test_any_order_of_takes_and_gives() -> None:
    rng = random.Random(5)
    pool = BlockPool(120, 4)
    cells: set[tuple[int, int]] = set()
    held: list[tuple[list[int], list[int]]] = []
    for _ in range(600):
        start = rng.randrange(4)
        layers = list(range(start, rng.randrange(start, 4) + 1))
        count = rng.randrange(0, 9)
        if held and rng.random() < 0.5:
            layers, numbers = held.pop(rng.randrange(len(held)))
            pool.give(layers, numbers)
            cells -= {(layer, number) for layer in layers for number in numbers}
        elif count * len(layers) > 120 - len(cells):
            with pytest.raises(BusyError):
                pool.take(layers, count)
        else:
            after = rng.choice(held)[1][-1:] if held else []
            numbers = pool.take(layers, count, after=after[0] if after else None).tolist()
            taken = {(layer, number) for layer in layers for number in numbers}
            assert len(taken) == count * len(layers)
            assert not taken & cells
            cells |= taken
            held.append((layers, numbers))
        assert pool.free == 120 - len(cells)
        used = {layer for layer, _ in cells}
        assert pool.heights() == {it: max(n + 1 for at, n in cells if at == it) for it in used}
