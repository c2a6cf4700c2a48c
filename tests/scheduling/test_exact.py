"""The certifying solver against plain enumeration, both ways that it has, and cases worked by hand."""

from __future__ import annotations

import sys

import pytest
from support.placement import fewest_stages_by_force, random_cluster

from p2pllm.errors import ModelError
from p2pllm.scheduling import Capacity, Offer, fewest_stages


def fleet(*capacities, region="us"):
    return [
        Offer(f"{region}{number}", region, c if isinstance(c, Capacity) else Capacity.same(c), layer_s=1e-3)
        for number, c in enumerate(capacities)
    ]


IDLE = fleet(*[0] * 11, region="nowhere")
"""Peers that can hold nothing, enough of them to have HiGHS asked."""


@pytest.mark.parametrize("seed", range(300))
def test_every_s_of_k_by_trying(seed):
    layers, offers, _ = random_cluster(seed)
    assert fewest_stages(layers, offers) == fewest_stages_by_force(layers, offers)


@pytest.mark.parametrize("seed", range(1000, 1060))
def test_every_s_of_k_by_highs(seed):
    layers, offers, _ = random_cluster(seed)
    assert fewest_stages(layers, offers + IDLE) == fewest_stages_by_force(layers, offers)


@pytest.mark.parametrize("idle", [[], IDLE])
@pytest.mark.parametrize(
    ("layers", "offers", "expected"),
    [
        (64, fleet(22, 22, 20), {1: 3}),
        (64, fleet(22, 22, 19), {}),
        (5, fleet(5), {1: 1}),
        # One pipeline of two stages, or four peers for two; the fifth is never needed.
        (10, fleet(7, 6, 4, 3, 2), {1: 2, 2: 4}),
        # Three pairs would need every pair to be 20 exactly, and no 9 goes with an 11.
        (20, fleet(11, 11, 10, 10, 10, 8, 7, 7), {1: 2, 2: 4, 3: 7}),
        # Fewest stages for one is not part of fewest stages for two.
        (12, fleet(8, 6, 6, 4), {1: 2, 2: 4}),
        # The regions never help each other, and share out the replicas where it costs least.
        (10, fleet(5, 5, 5) + fleet(5, 10, region="eu"), {1: 1, 2: 3}),
        (10, fleet(9) + fleet(9, region="eu"), {}),
        # Ends: each can hold the middle, one can be first, another last.
        (9, fleet(Capacity(4, 2, 0, 0), Capacity(4, 0, 3, 0), Capacity.same(4)), {1: 3}),
        (10, fleet(Capacity(4, 2, 0, 0), Capacity(4, 0, 3, 0), Capacity(4, 0, 0, 0)), {}),
        (4, fleet(Capacity(4, 4, 0, 0), Capacity(4, 4, 0, 0)), {}),
        (4, fleet(Capacity(4, 3, 3, 3), Capacity(4, 3, 3, 3)), {1: 2}),
        # A layer cannot be shared, so neither can its embedding and head.
        (1, fleet(Capacity(1, 1, 0, 0), Capacity(1, 0, 1, 0)), {}),
        (1, fleet(1, 1), {1: 1, 2: 2}),
        (3, [], {}),
    ],
)
def test_by_hand(layers, offers, expected, idle):
    assert fewest_stages(layers, [*offers, *idle]) == expected


def test_a_fleet_of_the_paper():
    """5 × 17 + 2 × 13 layers hold one replica of 64, 5 × 22 + 2 × 17 two (FACTS section 3)."""
    assert fewest_stages(64, fleet(*[17] * 5, *[13] * 2)) == {1: 4}
    assert fewest_stages(64, fleet(*[22] * 5, *[17] * 2)) == {1: 3, 2: 7}


def test_thirty_two_peers_of_eight_types():
    """Eq 1 allows 13 replicas of 64 in 868 layers, but that would waste only 36.

    Each 57 needs a partner, at the least a 14 with 7 too many: 28. Of the rest each 34 wastes 2 at the least
    (34 + 34), each 28 one (28 + 20 + 17): 12 more. Leaving peers out costs more still.
    """
    found = fewest_stages(64, fleet(*[57, 34, 28, 25, 22, 20, 17, 14] * 4))
    # Two stages suffice only with a 57 or two 34s, so for six pipelines at most.
    assert found == {k: 2 * k + max(0, k - 6) for k in range(1, 13)}


def test_too_many_peers_to_certify():
    with pytest.raises(ModelError, match="33 peers are too many to certify, the limit is 32"):
        fewest_stages(4, fleet(*[1] * 33))


def test_without_scipy(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    assert fewest_stages(4, fleet(*[4] * 10)) == {k: k for k in range(1, 11)}
    with pytest.raises(ModelError, match=r"more than 10 peers needs scipy: pip install 'p2pllm\[exact\]'"):
        fewest_stages(4, fleet(*[4] * 11))


def test_out_of_time_says_what_is_known(monkeypatch):
    monkeypatch.setattr("p2pllm.scheduling.phase1.exact._HIGHS_LIMIT_S", 0.0)
    with pytest.raises(ModelError, match=r"HiGHS could not tell in 0 s how few stages 1 pipelines"):
        fewest_stages(64, fleet(*range(10, 26)))
