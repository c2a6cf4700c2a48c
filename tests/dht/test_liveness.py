"""Timeouts and the negative cache, worked by hand."""

from __future__ import annotations

import pytest

from p2pllm.dht.liveness import Liveness
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
    for now in (0.0, 10.0, 30.0):
        assert not liveness.forgettable(HERE)
        liveness.missed(HERE, now)
    assert liveness.forgettable(HERE)
    assert liveness.silent(HERE, 31.0)
    liveness.asked(HERE, 31.0)
    assert not liveness.forgettable(HERE)
    assert not liveness.silent(HERE, 31.0)
    assert liveness.heard(HERE) == 31.0


def test_questions_that_fail_together_are_one_miss() -> None:
    liveness = Liveness()
    for _ in range(3):
        liveness.missed(HERE, 0.0)
    assert not liveness.forgettable(HERE)
    assert not liveness.silent(HERE, 8.0)


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


def test_an_id_is_proven_for_one_address_until_that_has_been_silent_for_long() -> None:
    liveness = Liveness()
    liveness.proved(HERE, b"i" * 20)
    assert liveness.proven(HERE) == b"i" * 20
    assert liveness.proven(THERE) is None
    for now in (0.0, 10.0):
        liveness.missed(HERE, now)
    assert liveness.proven(HERE) == b"i" * 20
    liveness.missed(HERE, 30.0)
    assert liveness.proven(HERE) is None


def test_an_address_is_greeted_once_a_second() -> None:
    liveness = Liveness()
    assert [liveness.may_greet(HERE, now) for now in (0.0, 0.9, 1.0, 1.5)] == [True, False, True, False]
    assert liveness.may_greet(THERE, 0.0)
