"""Water-filling: known pipelines, and an independent bisection."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pllm.errors import ModelError
from p2pllm.scheduling import fill

# Layers that fit as a middle stage and as either end of a pipeline, and dense TFLOPS.
GPUS = {"80": (13, 13, 312.0), "40": (6, 6, 312.0), "32": (5, 4, 165.0), "24": (4, 3, 82.6)}


@pytest.mark.parametrize(
    ("layers", "pipeline", "expected"),
    [
        (21, "80 32 24", [13, 5, 3]),
        (20, "80 32 24", [12, 5, 3]),
        (15, "80 32", [11, 4]),
        (25, "80 32 24 24", [13, 5, 4, 3]),
        (29, "24 80 32 32 24", [3, 13, 5, 5, 3]),
        (8, "32 32", [4, 4]),
        (7, "40 32", [5, 2]),
        (36, "80 80 80", [12, 12, 12]),
        (22, "80 40 24", [13, 6, 3]),
        (5, "80", [5]),
        (6, "24 24", [3, 3]),
    ],
)
def test_known_pipelines(layers, pipeline, expected):
    names = pipeline.split()
    capacities = [GPUS[name][1 if place in (0, len(names) - 1) else 0] for place, name in enumerate(names)]
    assert fill(layers, capacities, [GPUS[name][2] for name in names]) == expected


def test_faster_stages_take_more_in_proportion():
    assert fill(30, [30, 30, 30], [1.0, 2.0, 3.0]) == [5, 10, 15]


def test_remainders_go_to_the_largest_and_then_to_the_earlier():
    assert fill(7, [10, 10], [1.0, 1.0]) == [4, 3]
    # 10 layers at 1 : 2 : 3 are 1.67, 3.33 and 5.
    assert fill(10, [10, 10, 10], [1.0, 2.0, 3.0]) == [2, 3, 5]
    # 10.5 and 31.5, of which rounding makes unequal remainders.
    assert fill(46, [41, 58, 4], [1.0, 3.0, 3.0]) == [11, 31, 4]


def test_caps_come_before_remainders():
    # Uncapped this is 4.8 : 4.8 : 2.4; the second may hold 4 and must not be rounded up past it.
    assert fill(12, [9, 4, 9], [2.0, 2.0, 1.0]) == [5, 4, 3]


def test_every_stage_gets_a_layer():
    assert fill(4, [9, 9, 9], [1000.0, 1.0, 1.0]) == [2, 1, 1]
    assert fill(3, [9, 9, 9], [1000.0, 1.0, 1.0]) == [1, 1, 1]
    assert fill(4, [1, 1, 2], [5.0, 5.0, 1.0]) == [1, 1, 2]


def test_the_head_counts_as_layers_of_the_last_stage():
    assert fill(27, [30, 30, 30], [1.0, 1.0, 1.0], head_layers=3.0) == [10, 10, 7]
    assert fill(10, [30, 30], [1.0, 1.0], head_layers=100.0) == [9, 1]


def test_what_cannot_be_is_said():
    with pytest.raises(ModelError, match="30 layers but only 29 fit"):
        fill(30, [15, 14], [1.0, 1.0])
    with pytest.raises(ModelError, match="use fewer peers"):
        fill(2, [5, 5, 5], [1.0, 1.0, 1.0])
    with pytest.raises(ModelError, match="use fewer peers"):
        fill(5, [5, 0], [1.0, 1.0])
    with pytest.raises(ModelError):
        fill(1, [], [])
    for speeds in ([1.0], [1.0, 0.0], [1.0, math.inf], [1.0, math.nan]):
        with pytest.raises(ValueError, match="speed"):
            fill(2, [1, 1], speeds)


stages = st.lists(
    st.tuples(st.integers(1, 40), st.floats(0.01, 1000.0, allow_nan=False)), min_size=1, max_size=12
)


@given(stages, st.floats(0.0, 20.0), st.data())
def test_close_to_the_level_that_bisection_finds(pipeline, head_layers, data):
    capacities, speeds = [list(column) for column in zip(*pipeline, strict=True)]
    layers = data.draw(st.integers(len(capacities), sum(capacities)))

    def at(level):
        heads = [0.0] * (len(speeds) - 1) + [head_layers]
        return [
            min(cap, max(1.0, level * speed - head))
            for cap, speed, head in zip(capacities, speeds, heads, strict=True)
        ]

    low, high = 0.0, 1e5
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(at(middle)) < layers else (low, middle)

    counts = fill(layers, capacities, speeds, head_layers=head_layers)
    assert sum(counts) == layers
    for count, cap, share in zip(counts, capacities, at(high), strict=True):
        assert 1 <= count <= cap
        assert abs(count - share) < 1 + 1e-6


@pytest.mark.parametrize("head_layers", [1e3, 1e16, 1e300])
def test_a_head_of_any_size_leaves_the_last_stage_what_others_cannot_hold(head_layers):
    assert fill(64, [42, 42], [1.0, 1.0], head_layers=head_layers) == [42, 22]
    assert fill(64, [42, 70], [3.0, 1e-3], head_layers=head_layers) == [42, 22]
    assert fill(5, [9, 9], [1.0, 1.0], head_layers=head_layers) == [4, 1]


def test_a_head_does_not_drown_the_layers_in_rounding():
    """Speeds 10^22 apart, and a head that lasts as long as half the layers of the slow stage do."""
    first, last = fill(6, [33, 62], [1e-5, 4e17], head_layers=2e17)
    assert first + last == 6
    assert min(first, last) >= 1
