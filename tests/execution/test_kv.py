"""The block pool and one session's cache."""

from __future__ import annotations

import pytest
import torch

from p2pllm.errors import BusyError
from p2pllm.execution.kv import KvPool, SessionCache, blocks_for


@pytest.mark.parametrize(("tokens", "layers", "blocks"), [(1, 1, 1), (16, 1, 1), (17, 1, 2), (33, 10, 30)])
def test_blocks(tokens: int, layers: int, blocks: int) -> None:
    assert blocks_for(tokens, layers) == blocks


def test_pool_takes_all_or_nothing() -> None:
    pool = KvPool(10)
    pool.take(7)
    with pytest.raises(BusyError, match="4 blocks wanted, 3 of 10 free"):
        pool.take(4)
    pool.take(3)
    pool.give(10)
    assert pool.free == 10


def test_cache_grows_and_keeps_what_it_has() -> None:
    cache = SessionCache(2, 4, 2)
    first = torch.arange(12.0).view(1, 3, 4)
    cache.capacity = 3
    cache.extend(3, 0, first, first + 100)
    cache.capacity = 16
    keys, values = cache.extend(3, 3, torch.ones(1, 1, 4), torch.zeros(1, 1, 4))
    assert torch.equal(keys, torch.cat([first, torch.ones(1, 1, 4)], dim=1))
    assert torch.equal(values, torch.cat([first + 100, torch.zeros(1, 1, 4)], dim=1))
    assert cache.token_bytes == 2 * 4 * 4


def test_a_pool_that_shrinks_gives_nothing_until_it_is_free() -> None:
    pool = KvPool(10)
    pool.take(7)
    pool.resize(4)
    assert (pool.total, pool.free) == (4, -3)
    with pytest.raises(BusyError, match="1 blocks wanted, 0 of 4 free"):
        pool.take(1)
    pool.give(5)
    pool.take(2)
    pool.resize(6)
    assert (pool.total, pool.free) == (6, 2)
