"""Slabs of blocks: what is written is there, what grows keeps it, what is freed is gone."""

from __future__ import annotations

import torch

from p2pllm.execution.kv import KvStore, Target, private_caches


def rows(first: int, count: int) -> torch.Tensor:
    """(2 heads, tokens, 3), each token with a value of its own."""
    return torch.arange(first, first + count).view(1, count, 1).expand(2, count, 3).float()


def test_slabs_grow_and_keep_what_they_have() -> None:
    store = KvStore()
    store.write(7, Target(slice(14, 16), None, 1), rows(14, 2), -rows(14, 2))
    scattered = torch.tensor([100, 3])
    keys, values = store.write(7, Target(scattered, torch.tensor([4, 5]), 7), rows(20, 2), -rows(20, 2))
    assert keys.shape == (2, 7 * 16, 3)
    assert keys[0, [14, 15, 100, 3, 4, 5], 0].tolist() == [14, 15, 20, 21, 0, 0]
    assert torch.equal(values[:, scattered], -rows(20, 2))
    assert store.token_bytes([7]) == 2 * (2 * 3) * 4


def test_slabs_grow_by_half_so_that_copies_are_few() -> None:
    store = KvStore()
    sizes = {
        store.write(0, Target(slice(0, 1), None, n), rows(0, 1), rows(0, 1))[0].shape[1]
        for n in range(1, 200)
    }
    assert len(sizes) < 16


def test_no_slab_grows_past_what_all_may_have_but_where_blocks_want_it() -> None:
    store = KvStore()
    store.most_bytes = 2 * 20 * 16 * 2 * (2 * 3) * 4  # of two layers, 20 blocks each
    for layer in (0, 1):
        store.write(layer, Target(slice(0, 1), None, 16), rows(0, 1), rows(0, 1))
    lengths = [
        store.write(layer, Target(slice(0, 1), None, blocks), rows(0, 1), rows(0, 1))[0].shape[1] // 16
        for layer, blocks in ((0, 17), (1, 17), (1, 30), (0, 25))
    ]
    assert lengths == [20, 18, 30, 25]


def test_copies_are_of_the_layers_named() -> None:
    store = KvStore()
    for layer in (1, 2):
        store.write(layer, Target(slice(0, 16), None, 1), rows(0, 16), rows(0, 16))
    store.copy(((1, 3), 0, 4))
    assert store.write(1, Target(slice(0, 1), None, 1), rows(0, 1), rows(0, 1))[0].shape[1] == 5 * 16
    keys, _ = store.write(1, Target(slice(0, 1), None, 1), rows(0, 1), rows(0, 1))
    assert torch.equal(keys[:, 64:], rows(0, 16))
    assert store.write(2, Target(slice(0, 1), None, 1), rows(0, 1), rows(0, 1))[0].shape[1] == 16


def test_what_is_not_retained_is_gone() -> None:
    store = KvStore()
    for layer in (1, 2, 3):
        store.write(layer, Target(slice(0, 16), None, 8), rows(0, 16), rows(0, 16))
    store.retain({1: 2, 2: 0, 3: 9})
    sizes = {layer: keys.shape[1] // 16 for layer, (keys, _) in store._slabs.items()}
    assert sizes == {1: 2, 3: 8}
    assert torch.equal(store._slabs[1][0][:, :16], rows(0, 16))


def test_private_caches_share_a_store_and_no_block() -> None:
    first, second = private_caches([17, 16])
    assert first.store is second.store
    assert (first.tables[None].tolist(), second.tables[None].tolist()) == ([0, 1], [2])
