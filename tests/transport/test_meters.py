"""Quotas and gauges, with a clock made by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pllm.transport.meters import Gauge, Quota


def test_so_much_and_no_more_until_the_period_ends():
    quota = Quota(3.0, 10.0)
    assert [quota.take(1.0, now) for now in (100.0, 101.0, 102.0)] == [0.0, 0.0, 8.0]
    assert [quota.take(2.0, now) for now in (110.0, 111.0)] == [0.0, 9.0]
    assert quota.take(50.0, 120.0) == 10.0
    # Nothing is saved up.
    assert [quota.take(1.0, now) for now in (500.0, 500.0, 500.0)] == [0.0, 0.0, 10.0]


@given(
    st.floats(0.1, 20.0),
    st.floats(0.001, 10.0),
    st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.001, 5.0)), min_size=1, max_size=300),
)
def test_who_waits_as_told_never_costs_more_than_twice_the_quota_in_any_period(most, period, events):
    """But for what was under way when it was used up."""
    quota, now, costs = Quota(most, period), 50.0, []
    for gap, cost in events:
        now += gap * period
        costs.append((now, cost))
        now += quota.take(cost, now)
    for start, _ in costs:
        within = [cost for time, cost in costs if start <= time < start + period]
        assert sum(within) <= 2 * (most + max(within)) * (1 + 1e-9)


@given(
    rate=st.floats(1e4, 1e9),
    delay=st.floats(0.0, 1.0),
    frames=st.lists(
        st.tuples(st.integers(100_000, 10_000_000), st.floats(0.0, 10.0)), min_size=1, max_size=40
    ),
)
def test_a_gauge_finds_the_rate_of_a_pipe_however_it_is_filled(rate, delay, frames):
    """A pipe that lets one frame after the other through, at a rate, and is ``delay`` long each way."""
    gauge, now, free, answers = Gauge(), 100.0, 0.0, []
    gauge.pinged(2 * delay)
    for nonce, (size, pause) in enumerate(frames):
        now += pause
        free = max(free, now) + size / rate
        for answer in [answer for answer in answers if answer[1] <= now]:
            gauge.answered(*answer)
            answers.remove(answer)
        assert gauge.sent(nonce, size, now)
        answers.append((nonce, free + 2 * delay))
    for answer in answers:
        gauge.answered(*answer)
    assert gauge.value == pytest.approx(rate, rel=1e-3)
    assert gauge.unhindered == (pytest.approx(rate, rel=1e-3) if len(frames) > 3 else 0.0)


def test_one_frame_of_four_tells_what_the_way_can_do():
    gauge = Gauge()
    for nonce in range(17):
        assert gauge.unhindered == (0.0 if nonce < 4 else pytest.approx(1e5))
        gauge.sent(nonce, 10_000, 10.0 * nonce)
        gauge.answered(nonce, 10.0 * nonce + (0.1 if nonce in (0, 4, 8, 12) else 1.0))
    assert gauge.unhindered == pytest.approx(1e4), "of the latest sixteen, only three were fast"


def test_without_a_known_round_trip_a_gauge_counts_it_as_transfer():
    gauge = Gauge()
    assert gauge.value == 0.0
    gauge.sent(1, 1000, 10.0)
    gauge.answered(1, 10.5)
    assert gauge.value == pytest.approx(2000.0)
    gauge.pinged(0.1)
    gauge.pinged(0.4)
    gauge.sent(2, 300, 20.0)
    gauge.answered(2, 20.6)
    # Worked by hand: (0.9 · 1000 + 300) / (0.9 · 0.5 + 0.6 - 0.1)
    assert gauge.value == pytest.approx(1200 / 0.95)


def test_a_gauge_follows_what_changes():
    gauge = Gauge()
    for nonce in range(100):
        now, rate = float(nonce), 1e9 if nonce < 50 else 1e6
        gauge.sent(nonce, 1_000_000, now)
        gauge.answered(nonce, now + 1_000_000 / rate)
    assert gauge.value == pytest.approx(1e6, rel=0.02)


def test_answers_that_nobody_asked_for_or_that_come_too_soon_count_for_nothing():
    gauge = Gauge()
    gauge.pinged(0.1)
    gauge.answered(7, 1.0)
    gauge.sent(1, 1_000_000, 1.0)
    gauge.answered(1, 1.05)
    gauge.answered(1, 2.0)
    assert gauge.value == 0.0


def test_a_gauge_does_not_remember_more_than_a_few_that_are_never_answered():
    gauge = Gauge()
    asked = [gauge.sent(nonce, 1_000_000, 1.0) for nonce in range(1000)]
    assert sum(asked) == 64
    assert asked == sorted(asked, reverse=True)
