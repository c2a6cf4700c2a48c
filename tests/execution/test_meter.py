"""Running means."""

from __future__ import annotations

import pytest

from p2pllm.execution.meter import Meter


def test_rests_until_something_is_measured() -> None:
    assert Meter(2.0, half_life=10).value(99.0) == 2.0


def test_moves_towards_samples() -> None:
    meter = Meter(1.0, half_life=10)
    meter.add(2.0, now=0.0)
    assert meter.value(0.0) == pytest.approx(1.1)
    meter.add(2.0, now=0.0)
    assert meter.value(0.0) == pytest.approx(1.19)


def test_drifts_back_by_half_in_a_half_life() -> None:
    meter = Meter(1.0, half_life=10)
    meter.add(11.0, now=0.0)
    assert [meter.value(now) for now in (0.0, 10.0, 20.0)] == pytest.approx([2.0, 1.5, 1.25])
