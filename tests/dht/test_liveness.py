"""Timeouts, the negative cache and the rate limit, worked by hand."""

from __future__ import annotations

import pytest

from p2pllm.dht.liveness import Liveness, RateLimit
from p2pllm.dht.wire import NO_TOKEN

HERE, THERE = ("192.0.2.1", 1000), ("192.0.2.2", 1000)
TOKEN = b"t" * 8


@pytest.mark.parametrize(
    ("rtt", "timeout"), [(0.001, 0.12), (0.04, 0.12), (0.05, 0.15), (0.1, 0.3), (0.2, 0.5), (3.0, 0.5)]
)
def test_the_timeout_is_three_round_trips_within_bounds(rtt: float, timeout: float) -> None:
    liveness = Liveness()
    liveness.answered(HERE, rtt, TOKEN, 0.0)
    assert liveness.timeout(HERE) == pytest.approx(timeout)


def test_a_stranger_gets_the_longest_timeout_until_there_is_experience() -> None:
    liveness = Liveness()
    assert liveness.timeout(THERE) == 0.5
    liveness.answered(HERE, 0.05, TOKEN, 0.0)
    assert liveness.timeout(THERE) == pytest.approx(0.15)


def test_round_trips_are_smoothed_by_an_eighth() -> None:
    liveness = Liveness()
    liveness.answered(HERE, 0.08, TOKEN, 0.0)
    liveness.answered(HERE, 0.16, TOKEN, 0.0)
    assert liveness.timeout(HERE) == pytest.approx(3 * 0.09)


def test_silence_lasts_8_s_and_doubles_with_each_miss() -> None:
    liveness, now, lengths = Liveness(), 0.0, []
    for _ in range(5):
        liveness.missed(HERE, now)
        length = next(s for s in range(1, 200) if not liveness.silent(HERE, now + s))
        lengths.append(length)
        now += length
    assert lengths == [8, 16, 32, 64, 64]


def test_three_misses_cost_the_place_and_any_sign_of_life_is_forgiven() -> None:
    liveness = Liveness()
    for _ in range(3):
        assert not liveness.forgettable(HERE)
        liveness.missed(HERE, 0.0)
    assert liveness.forgettable(HERE)
    assert liveness.silent(HERE, 1.0)
    liveness.asked(HERE, 1.0)
    assert not liveness.forgettable(HERE)
    assert not liveness.silent(HERE, 1.0)
    assert liveness.heard(HERE) == 1.0


def test_a_token_belongs_to_an_address() -> None:
    liveness = Liveness()
    liveness.answered(HERE, 0.01, TOKEN, 0.0)
    assert liveness.token(HERE) == TOKEN
    assert liveness.token(THERE) == NO_TOKEN


def test_memory_is_bounded_and_the_longest_unheard_goes_first() -> None:
    liveness = Liveness()
    liveness.answered(HERE, 0.01, TOKEN, 0.0)
    liveness.answered(THERE, 0.01, TOKEN, 0.0)
    liveness.asked(HERE, 1.0)
    for port in range(4095):
        liveness.asked(("198.51.100.1", port), 2.0)
    assert liveness.token(THERE) == NO_TOKEN
    assert liveness.token(HERE) == TOKEN


def test_the_rate_limit_gives_a_burst_and_then_its_rate() -> None:
    limit = RateLimit(rate=10, burst=3)
    assert [limit.allows(HERE, 0.0) for _ in range(4)] == [True, True, True, False]
    assert limit.allows(THERE, 0.0), "others are not affected"
    assert [limit.allows(HERE, 0.25) for _ in range(3)] == [True, True, False]
    assert [limit.allows(HERE, 99.0) for _ in range(4)] == [True, True, True, False]
