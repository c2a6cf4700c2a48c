"""A recorded pass: the same as the function, for other values as well; and what cannot be recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from p2pllm.execution import open_checkpoint
from p2pllm.execution.architecture.recording import Recorded

from .conftest import TINY, Chain, load_slice


def rows(count: int, seed: int) -> Tensor:
    return torch.randn(1, count, 4, generator=torch.Generator().manual_seed(seed))


class Counted:
    """A function that knows how often it was run itself."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function, self.runs = function, 0

    def __call__(self, key: Any, *inputs: Any) -> Tensor:
        self.runs += 1
        return self.function(key, *inputs)


def mixed(key: float, x: Tensor, store: Tensor) -> Tensor:
    """In place, in pieces, with slices, shapes, constants, and results that nobody uses."""
    count = x.shape[1]
    low, high = x.contiguous().chunk(2, dim=-1)
    y = torch.cat((high, -low), -1).mul_(key).to(torch.float32)
    y[:, :, 0] = 2 * low[..., 1]
    y.topk(2, -1)
    values, _ = y.max(-1, keepdim=True)
    (only,) = y.split(4, -1)
    store.index_copy_(0, torch.arange(count), only[0])
    return (torch.nn.functional.silu(only) + values).view(count, *x.shape[2:]) + store[:count]


def test_other_values_give_what_the_function_gives() -> None:
    function = Counted(mixed)
    recorded = Recorded(function)
    for key in (0.5, 3.0):
        for count in (1, 3):
            for seed in range(6):
                ours, theirs = torch.zeros(5, 4), torch.zeros(5, 4)
                result = recorded(key, rows(count, seed), ours)
                assert torch.equal(result, mixed(key, rows(count, seed), theirs))
                assert torch.equal(ours, theirs)
    assert function.runs == 4 * 3  # to see, to record, to verify


def test_parameters_may_change_when_what_was_recorded_is_forgotten() -> None:
    weight = [torch.ones(4)]
    recorded = Recorded(lambda _, x: x * weight[0])
    for _ in range(4):
        recorded(None, rows(1, 1))
    weight[0] = torch.full((4,), 2.0)
    recorded.forget()
    assert torch.equal(recorded(None, rows(1, 1)), 2 * rows(1, 1))


@pytest.mark.parametrize(
    "function",
    [
        lambda _, x: x + x.nonzero().sum(),
        lambda _, x: x + len(torch.where(x > 0)[0]),
        lambda _, x: x + x[x > 0].sum(),
        lambda _, x: x if x.sum() > 0 else -x,
        lambda _, x: x * float(x.max()),
        lambda _, x: x + x[0].tolist()[0][0],
        lambda _, x: torch.from_numpy(x.numpy() * 2),
    ],
)
def test_what_depends_on_values_runs_itself(function: Callable[..., Tensor]) -> None:
    counted = Counted(function)
    recorded = Recorded(counted)
    for seed in range(8):
        assert torch.equal(recorded(None, rows(2, seed)), function(None, rows(2, seed)))
    assert counted.runs >= 8


def test_what_was_recorded_with_values_that_do_not_count_as_others_is_not_trusted() -> None:
    """It keeps something behind the recorder's back."""
    seen: list[Tensor] = []

    def function(_: None, x: Tensor) -> Tensor:
        seen.append(x)
        return x + (seen[-2] if len(seen) > 1 else x)

    recorded = Recorded(function)
    results = [recorded(None, rows(2, seed)) for seed in range(6)]
    expected = [rows(2, seed) + rows(2, max(0, seed - 1)) for seed in range(6)]
    assert all(map(torch.equal, results, expected))


def test_rows_that_are_no_numbers_do_not_make_a_pass_untrusted() -> None:
    counted = Counted(lambda _, x: x * 2)
    recorded = Recorded(counted)
    for seed in range(2):
        recorded(None, rows(1, seed))
    recorded(None, torch.full((1, 1, 4), torch.nan))
    for seed in range(5):
        recorded(None, rows(1, seed))
    assert counted.runs == 4


def test_many_rows_are_not_recorded() -> None:
    counted = Counted(lambda _, x: x * 2)
    recorded = Recorded(counted)
    for seed in range(5):
        recorded(None, rows(17, seed))
    assert counted.runs == 5


@pytest.mark.parametrize("kind", TINY)
@torch.inference_mode()
def test_architectures_decode_as_transformers_does_when_recorded(
    kind: str, saved_model: Callable[[str], tuple[Path, Any]]
) -> None:
    """Two sessions, past a window of 6; experts are chosen anew for every token."""
    directory, whole = saved_model(kind)
    checkpoint = open_checkpoint(str(directory))
    slices = [load_slice(checkpoint, 0, 2), load_slice(checkpoint, 2, 4)]
    chain = Chain(slices, sessions=2)
    texts = torch.randint(100, (2, 14), generator=torch.Generator().manual_seed(1))
    chain.step({0: texts[0, :4].tolist(), 1: texts[1, :3].tolist()})
    for step in range(9):
        given = chain.step({0: [int(texts[0, 4 + step])], 1: [int(texts[1, 3 + step])]})
        for session, end in ((0, 5 + step), (1, 4 + step)):
            expected = whole(texts[session : session + 1, :end]).logits[0, -1]
            torch.testing.assert_close(given[session][0], expected, atol=1e-4, rtol=0)
    for it in slices:
        recorded = it.stage._model._pass._known[(it.start, it.end), 2]
        assert recorded is not None
        assert recorded.is_trusted
