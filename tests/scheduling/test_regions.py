"""Derived regions on maps where everybody can see who is near whom."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pllm.scheduling import derive_regions


def on_a_line(places):
    """ρ between peers at these places (ms)."""
    return {(a, b): abs(places[a] - places[b]) / 1000 for a, b in itertools.permutations(places, 2)}


def derive(places, given=None, before=None):
    return derive_regions(places, given or {}, on_a_line(places), before=before)


def together(regions):
    """Who shares a region, whatever its name."""
    groups = {}
    for peer, name in regions.items():
        groups.setdefault(name, set()).add(peer)
    return sorted(map(sorted, groups.values()))


def test_a_peer_takes_the_region_of_its_nearest_peer():
    places = {"oslo": 0, "rome": 40, "x": 14, "y": 26, "z": 100}
    assert derive(places, {"oslo": "north", "rome": "south"}) == {
        "oslo": "north",
        "rome": "south",
        "x": "north",
        "y": "north",  # 12 ms from x, which is north, and 14 ms from rome
        "z": "near-z",
    }


def test_fifteen_milliseconds_are_far():
    assert derive({"a": 0, "b": 15}, {"a": "here"})["b"] == "near-b"
    assert derive({"a": 0, "b": 14.9}, {"a": "here"})["b"] == "here"


def test_new_regions_are_named_after_who_opens_them():
    assert derive({"b": 0, "a": 10, "c": 50}) == {"a": "near-a", "b": "near-a", "c": "near-c"}
    long = "0123456789abcdef" * 2
    assert derive({long: 0}) == {long: "near-01234567"}


def test_names_in_use_are_not_given_twice():
    alike = {"01234567a": 0, "01234567b": 50, "01234567c": 100}
    assert derive(alike, {"01234567c": "near-01234567"}) == {
        "01234567a": "near-01234567-2",
        "01234567b": "near-01234567-3",
        "01234567c": "near-01234567",
    }
    # The peer that opened a region comes back far from it.
    before = {"b": "near-a", "c": "near-a"}
    assert derive({"a": 90, "b": 0, "c": 1}, before=before) == {**before, "a": "near-a-2"}
    # a falls out of home, and near-a is what b still has.
    assert derive({"a": 0, "b": 50, "c": 100}, {"c": "home"}, {"a": "home", "b": "near-a"}) == {
        "a": "near-a-2",
        "b": "near-a",
        "c": "home",
    }


def test_what_is_not_known_is_far():
    assert derive_regions("ab", {}, {}) == {"a": "near-a", "b": "near-b"}


def test_both_directions_count():
    def rho_of(there, back):
        return {("a", "b"): there, ("b", "a"): back}

    assert len(together(derive_regions("ab", {}, rho_of(0.001, 0.028)))) == 1
    assert len(together(derive_regions("ab", {}, rho_of(0.001, 0.030)))) == 2
    assert len(together(derive_regions("ab", {}, rho_of(None, 0.014)))) == 1
    assert len(together(derive_regions("ab", {}, rho_of(0.014, None)))) == 1
    assert len(together(derive_regions("ab", {}, rho_of(0.016, None)))) == 2


def test_peers_that_share_a_region_stay_until_they_are_half_as_far_again():
    before = {"a": "home", "b": "home"}
    assert derive({"a": 0, "b": 22}, before=before) == before
    assert derive({"a": 0, "b": 23}, before=before) == {"a": "home", "b": "near-b"}
    # Somebody else's being nearer moves nobody.
    assert derive({"a": 0, "b": 14, "z": 20}, {"z": "other"}, before) == {**before, "z": "other"}


def test_a_region_that_falls_apart_leaves_its_name_to_the_larger_part():
    before = dict.fromkeys("abcde", "home")
    # c, which connected them, is gone.
    assert derive({"a": 0, "b": 10, "d": 50, "e": 60, "f": 62}, before=before) == {
        "a": "home",
        "b": "home",
        "d": "near-d",
        "e": "near-d",
        "f": "near-d",
    }
    assert derive({"a": 0, "c": 50, "d": 55, "e": 60}, before=before) == {
        "a": "near-a",
        "c": "home",
        "d": "home",
        "e": "home",
    }


def test_a_derived_member_stays_with_those_who_were_given_the_region():
    given = {"a": "here", "b": "here"}
    before = {"x": "here", "y": "here", "z": "here"}
    assert derive({"a": 0, "b": 100, "x": 20, "y": 40, "z": 70}, given, before) == {
        **given,
        "x": "here",
        "y": "here",  # by way of x
        "z": "near-z",
    }


def test_regions_opened_before_anything_was_measured_grow_together():
    places = {"a": 0, "b": 1, "c": 2, "d": 80}
    before = derive_regions(places, {}, {})
    assert len(set(before.values())) == 4
    assert derive(places, before=before) == {"a": "near-a", "b": "near-a", "c": "near-a", "d": "near-d"}


def test_a_peer_alone_keeps_its_regions_name():
    assert derive({"b": 0, "c": 90}, before={"b": "home", "a": "home"}) == {"b": "home", "c": "near-c"}


def test_nobody_has_no_region():
    assert derive_regions([], {"a": "x"}, on_a_line({})) == {}


NAMES = "abcdefgh"
lines = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 80), min_size=1)
regions = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(["north", "near-a", "near-b"]))


@settings(derandomize=True, deadline=None)
@given(lines, regions, regions, st.data())
def test_one_answer_whatever_the_order_and_it_stays(places, given_regions, before, data):
    rho = on_a_line(places)
    answer = derive_regions(places, given_regions, rho, before=before)
    assert answer.keys() == places.keys()
    for peer in places.keys() & given_regions.keys():
        assert answer[peer] == given_regions[peer]

    shuffled = [dict(data.draw(st.permutations(list(d.items())))) for d in (given_regions, before)]
    order = data.draw(st.permutations(list(places)))
    assert derive_regions(order, shuffled[0], rho, before=shuffled[1]) == answer
    assert derive_regions(order, given_regions, rho, before=answer) == answer


@settings(derandomize=True, deadline=None)
@given(lines)
def test_with_nothing_given_regions_are_what_short_hops_connect(places):
    line = sorted(places, key=lambda peer: (places[peer], peer))
    expected = [[line[0]]]
    for one, other in itertools.pairwise(line):
        if places[other] - places[one] < 15:
            expected[-1].append(other)
        else:
            expected.append([other])
    assert together(derive(places)) == sorted(map(sorted, expected))


@settings(derandomize=True, deadline=None)
@given(st.lists(st.lists(st.floats(-1, 1), min_size=4, max_size=4), max_size=12))
def test_jitter_moves_nobody(rounds):
    still = {"a": 0, "b": 12, "c": 60, "d": 72}
    regions = derive(still)
    for jitter in rounds:
        moved = {peer: place + 5 * by for (peer, place), by in zip(still.items(), jitter, strict=True)}
        assert math.dist([moved["a"]], [moved["b"]]) <= 22
        assert derive(moved, before=regions) == regions


@pytest.mark.parametrize("swarm", ["abc", "cab"])
def test_growing_one_by_one_renames_nobody(swarm):
    places = {"a": 0, "b": 60, "c": 5}
    regions = {}
    for count in range(1, len(swarm) + 1):
        present = {peer: places[peer] for peer in swarm[:count]}
        grown = derive(present, before=regions)
        assert {**grown, **regions} == grown
        regions = grown
