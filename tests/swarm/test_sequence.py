"""Sequence numbers: above all that were ever used, and nobody else's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pllm.errors import P2PLLMError
from p2pllm.swarm.sequence import UNSAVED_MS, Sequence

OWN = "a" * 40


def test_a_clock_that_was_set_back_between_two_runs_does_no_harm() -> None:
    first = Sequence(OWN, 0.0)
    stored = first.next(1_000_000_000)
    for second in range(60):
        used = first.next(1_000_000_000 + 1000 * second)  # until the next time it is stored
    again = Sequence(OWN, 0.0, stored)
    assert again.next(1_000_000_000 - 3_600_000) > used
    assert again.last > used


def test_without_an_earlier_run_the_clock_begins() -> None:
    assert Sequence(OWN, 0.0).next(5) == 5
    assert Sequence(OWN, 0.0, 5).next(5) == 5 + UNSAVED_MS + 1


@given(st.lists(st.integers(0, 2**40), min_size=1), st.integers(0, 2**40))
def test_numbers_only_grow(clock: list[int], stored: int) -> None:
    numbers = Sequence(OWN, 0.0, stored)
    used = [numbers.next(wall) for wall in clock]
    assert used == sorted(set(used))
    assert used[0] > stored or not stored
    assert numbers.last == used[-1]


def test_a_record_of_an_earlier_run_is_jumped_over_and_a_foreign_one_is_the_end() -> None:
    numbers = Sequence(OWN, 100.0)
    numbers.next(10)
    numbers.seen(50, published=99.0)
    assert numbers.next(11) == 51
    with pytest.raises(P2PLLMError, match="another --data-dir"):
        numbers.seen(99, published=106.0)
