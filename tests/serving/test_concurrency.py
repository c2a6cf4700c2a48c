"""How many requests run at once, against service curves of which the right answer is known."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.service import Curve, Job, crowd, simulate

from p2pllm.config import PeerConfig
from p2pllm.serving.front.admission import Admission
from p2pllm.serving.front.concurrency import FIRST, MOST, STRETCH, ConcurrencyLimit
from p2pllm.serving.front.keys import Client

CLIENTS = [Client(name) for name in "abcdefgh"]
TENTH = "a tenth more for each"
CURVES: dict[str, Curve] = {
    TENTH: lambda count: 0.02 * (1 + 0.1 * (count - 1)),
    "hardly anything for each": lambda count: 0.02 + 0.0002 * count,
    "one after the other": lambda count: 0.05 * count,
    "nothing up to a cliff": lambda count: 0.02 * (1 + 0.05 * count + max(0, count - 12) * 0.5),
    "less and less for each": lambda count: 0.02 * count**0.35,
}


def best(curve: Curve, stretch: float = STRETCH) -> int:
    """The most requests at once that keep to the stretch, by trying all."""
    return max(count for count in range(1, MOST + 1) if curve(count) <= stretch * curve(1))


def test_peers_keep_to_it_unless_told(tmp_path: Path) -> None:
    assert PeerConfig(data_dir=tmp_path).stretch == STRETCH


def driven(limit: ConcurrencyLimit, curve: Curve, rng: random.Random, now: float, steps: int) -> float:
    """Always as many as the limit allows, with a tenth of noise."""
    for _ in range(steps):
        running = limit.value
        interval = curve(running) * rng.uniform(0.9, 1.1)
        now += interval
        for _ in range(running):
            limit.note(running, interval, now)
    return now


@pytest.mark.parametrize(
    ("name", "stretch"), [*((name, STRETCH) for name in CURVES), *((TENTH, other) for other in (1.2, 3.0))]
)
def test_it_finds_what_the_curve_allows(name: str, stretch: float) -> None:
    limit, rng = ConcurrencyLimit(stretch), random.Random(1)
    now = driven(limit, CURVES[name], rng, 0.0, 300)
    right, seen = best(CURVES[name], stretch), []
    for _ in range(20):
        now = driven(limit, CURVES[name], rng, now, 50)
        seen.append(limit.value)
    assert 0.75 * right - 1 <= sum(seen) / 20 <= 1.15 * right + 2, (right, seen)


@pytest.mark.parametrize("change", [0.5, 3.0])
def test_it_follows_when_the_swarm_gets_faster_or_slower(change: float) -> None:
    """The stretch counts from what one takes now, not from what it took once."""
    curve, limit, rng = CURVES[TENTH], ConcurrencyLimit(), random.Random(2)
    now = driven(limit, curve, rng, 0.0, 400)
    driven(limit, lambda count: change * curve(count), rng, now, 4000)
    assert 4 <= limit.value <= 17


def test_a_machine_that_others_use_as_well_is_not_taken_for_too_many_requests() -> None:
    """For seconds at a time everything takes three times as long: the limit stays about where it is right."""
    curve, limit, rng = CURVES[TENTH], ConcurrencyLimit(), random.Random(6)
    now, seen = driven(limit, curve, rng, 0.0, 200), []
    for _ in range(60):
        slow = rng.choice([1.0, 3.0])
        now = driven(limit, lambda count, slow=slow: slow * curve(count), rng, now, rng.randint(20, 200))
        seen.append(limit.value)
    assert 5 <= sum(seen) / len(seen) <= 13, seen


def test_a_single_pause_changes_little() -> None:
    means = []
    for has_pause in (False, True):
        curve, limit, rng = CURVES["hardly anything for each"], ConcurrencyLimit(), random.Random(3)
        now = driven(limit, curve, rng, 0.0, 1000)
        for _ in range(limit.value * has_pause):
            limit.note(limit.value, 5.0, now)
        seen = []
        for _ in range(30):
            now = driven(limit, curve, rng, now, 5)
            seen.append(limit.value)
        means.append(sum(seen) / len(seen))
    without, with_pause = means
    assert 0.9 * without <= with_pause <= 1.1 * without


def test_a_limit_that_is_not_in_use_does_not_grow() -> None:
    limit = ConcurrencyLimit()
    for number in range(1000):
        limit.note(1, 0.01, number * 0.01)
    assert limit.value == FIRST + 1


@pytest.mark.parametrize("load", [1, 10])
@pytest.mark.parametrize("name", [TENTH, "nothing up to a cliff"])
def test_overload_leaves_the_goodput_where_it_was(name: str, load: int) -> None:
    """Goodput: tokens of requests that came whole, and as fast as the limit means them to (a fifth off)."""
    curve, until, warm, tokens = CURVES[name], 90.0, 20.0, 60
    capacity = best(curve) / curve(best(curve))
    jobs = crowd(random.Random(4), load * capacity / tokens, until, CLIENTS, tokens)
    simulate(curve, jobs, until)
    good = [
        job
        for job in jobs
        if job.complete and job.done[-1] > warm and job.interval <= 1.2 * STRETCH * curve(1)
    ]
    assert sum(job.tokens for job in good) / (until - warm) >= 0.9 * capacity
    if load > 1:
        assert sum(job.refused is not None for job in jobs) > len(jobs) / 2


@pytest.mark.parametrize("name", [TENTH, "hardly anything for each"])
@pytest.mark.parametrize("is_warm", [True, False])
def test_one_request_beside_fifty_takes_less_than_twice_as_long(name: str, is_warm: bool) -> None:
    curve, admission, tokens = CURVES[name], Admission(), 60
    if is_warm:
        simulate(curve, crowd(random.Random(5), 8.0, 30.0, CLIENTS, tokens), 1e9, admission)
    light = Job(1000.5, Client("light"), tokens)
    simulate(curve, [*(Job(1000.0, Client("greedy"), tokens) for _ in range(50)), light], 1e9, admission)
    assert light.took <= 2 * tokens * curve(1)
