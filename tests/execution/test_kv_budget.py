"""Bytes turned into blocks, worked by hand."""

from __future__ import annotations

import pytest

from p2pllm.errors import ModelError
from p2pllm.execution.kv_budget import KvBudget


def test_outputs_count_as_what_they_take() -> None:
    """As SmolLM2 has it: a layer keeps 1,536 bytes of a token, of which 2,304 go on to the next."""
    budget = KvBudget(30, 2304)
    budget.learn(1536)
    assert budget.block_bytes == 16 * 1536
    assert budget.costs == dict.fromkeys(range(31, 60), 2)
    assert budget.width([]) == 0
    assert budget.width(range(30)) == 30
    assert budget.width(range(20, 30)) == 10
    assert budget.width(range(10, 20)) == 12
    assert budget.width([0, 1, 5, 29]) == 4 + 2 * 2


def test_there_must_be_a_block_for_all_layers() -> None:
    budget = KvBudget(4, 100)
    budget.learn(100)
    assert budget.blocks([0, 1], 3 * 1600 + 1599) == 3
    with pytest.raises(ModelError, match="2 layers need 4800 bytes"):
        budget.blocks([0, 1], 3 * 1600 - 1)
    assert budget.blocks([2, 3], 2 * 1600) == 2


def test_a_larger_layer_makes_blocks_larger_and_changes_no_count() -> None:
    budget = KvBudget(4, 250)
    budget.learn(100)
    assert budget.costs[5] == 3
    budget.learn(60)
    assert budget.block_bytes == 1600
    budget.learn(200)
    assert (budget.block_bytes, budget.costs[5]) == (3200, 3)
