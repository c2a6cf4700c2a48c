"""Pauses double, are forgiven, and are forgotten."""

from __future__ import annotations

from p2pllm.swarm import BackOff

A, B = "a" * 40, "b" * 40


def test_pauses_double_up_to_the_most() -> None:
    pauses, now = BackOff(2.0, 10.0), 0.0
    for seconds in (2.0, 4.0, 8.0, 10.0, 10.0):
        pauses.failed(A, now)
        assert pauses.paused(now + seconds - 0.01) == {A}
        now += seconds
        assert pauses.paused(now) == frozenset()


def test_a_success_or_a_long_time_starts_anew() -> None:
    pauses = BackOff(2.0, 10.0)
    pauses.failed(A, 0.0)
    pauses.worked(A)
    pauses.failed(A, 1.0)
    assert pauses.paused(2.9) == {A}
    assert pauses.paused(3.0) == frozenset()
    assert pauses.paused(13.0) == frozenset()  # forgotten here
    pauses.failed(A, 13.0)
    assert pauses.paused(15.0) == frozenset()


def test_others_are_kept_apart() -> None:
    pauses = BackOff(2.0, 10.0)
    pauses.failed(A, 0.0)
    pauses.failed(B, 0.0)
    pauses.keep([B])
    assert pauses.paused(1.0) == {B}
