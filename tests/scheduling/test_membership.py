"""Joins, leaves and triggers, each worked by hand."""

from __future__ import annotations

import itertools

import pytest

from p2pllm.scheduling import (
    Capacity,
    Join,
    Member,
    Mend,
    Nothing,
    Offer,
    Replan,
    Rules,
    Slice,
    State,
    decide,
    mend,
)

RULES = Rules(threshold=0.25, low=0.15, min_interval_s=30.0, max_interval_s=100.0)


def member(peer, room, *ready, loading=(), power=1.0, leaving=False, pinned=False):
    """A peer with ``room`` layers anywhere, or a Capacity, that holds ``ready`` spans."""
    capacity = room if isinstance(room, Capacity) else Capacity.same(room)
    return Member(
        Offer(peer, "here", capacity, 1e-3, flops=power),
        tuple(Slice(peer, *span) for span in ready),
        tuple(Slice(peer, *span) for span in loading),
        leaving,
        pinned,
    )


def decided(layers, members, plan=(), state=None, now=0.0, requested=False):
    return decide(layers, members, plan, state or State(), now, rules=RULES, requested=requested)


def decision(*args, **kwargs):
    return decided(*args, **kwargs)[0]


JUST_PLANNED = State(0.0)
"""A placement at 0 s, so that none is due before 30 s."""


# Joins


def test_a_newcomer_joins_where_it_is_lightest():
    swarm = [member("a", 4, (0, 4), power=2.0), member("b", 6, (4, 10)), member("new", 3)]
    assert decision(10, swarm) == Join((Slice("new", 4, 7),))


def test_newcomers_of_one_moment_do_not_crowd():
    swarm = [member("a", 6, (0, 6)), member("x", 3), member("y", 3)]
    assert decision(6, swarm) == Join((Slice("x", 0, 3), Slice("y", 3, 6)))


def test_one_that_is_still_loading_or_about_to_counts():
    on_its_way = [member("a", 6, (0, 6)), member("x", 3, loading=[(0, 3)]), member("y", 3)]
    assert decision(6, on_its_way) == Join((Slice("y", 3, 6),))
    told = [member("a", 6, (0, 6)), member("x", 3), member("y", 3)]
    assert decision(6, told, [Slice("x", 0, 3)]) == Join((Slice("y", 3, 6),))


def test_who_cannot_hold_a_layer_is_left_alone():
    swarm = [member("a", 2, (0, 2)), member("b", 0), member("c", Capacity(9, 0, 0, 0))]
    assert decision(2, swarm) == Nothing()


def test_the_order_of_members_does_not_matter():
    swarm = [member("a", 9, (0, 9)), member("x", 3), member("y", 4), member("z", 3, power=0.3)]
    answers = {decision(9, order) for order in itertools.permutations(swarm)}
    assert answers == {Join((Slice("y", 0, 4), Slice("x", 4, 7), Slice("z", 6, 9)))}


def test_a_pinned_peer_is_never_given_layers():
    assert decision(4, [member("a", 4, (0, 4)), member("own", 4, pinned=True)]) == Nothing()
    # Its layers count, and where its power lies.
    pinned = member("own", 2, (0, 2), pinned=True)
    assert decision(4, [pinned, member("a", 4, (2, 4)), member("new", 2)]) == Join((Slice("new", 0, 2),))


# Leaves


def test_local_repair_moves_nobody():
    swarm = [member("b", 14, (14, 28)), member("c", 22, (0, 22))]
    plan = [Slice("a", 0, 14), Slice("b", 14, 28), Slice("c", 0, 22)]
    state = State(0.0, left=0.5)
    assert decision(28, swarm, plan, state, now=1e6) == Nothing()
    leaving = [*swarm, member("a", 14, (0, 14), leaving=True)]
    assert decision(28, leaving, plan, state, now=1e6) == Nothing()


def test_layers_without_a_holder_need_a_placement():
    swarm = [member("a", 4, (0, 2)), member("gone", 2, (2, 4), leaving=True)]
    plan = [Slice("a", 0, 2), Slice("gone", 2, 4)]
    answer, state = decided(4, swarm, plan, State(0.0, 60.0, 0.3), now=30.0)
    assert (answer, state) == (Replan("uncovered"), State(30.0, 60.0, None))
    assert decision(4, swarm[:1], plan) == Replan("uncovered")
    # On its way is enough, as long as it stays.
    coming = [*swarm, member("c", 2, loading=[(2, 4)])]
    assert decision(4, coming, plan, State(left=9.0)) == Nothing()


def test_the_plan_says_where_peers_are_going():
    # a holds 0:2, but is to leave them to b, who is gone.
    plan = [Slice("a", 2, 4), Slice("b", 0, 2)]
    assert decision(4, [member("a", 4, (0, 2))], plan) == Replan("uncovered")


def test_a_first_peer_is_placed_at_once():
    assert decided(4, [member("a", 4)]) == (Replan("uncovered"), State(0.0, 0.0, None))


def test_a_swarm_that_lacks_a_peer_welcomes_it_at_once():
    lonely = [member("a", 3)]
    assert decision(4, lonely, now=100.0) == Replan("uncovered")
    # Phase 1 said that it is too small, so the state stayed.
    assert decision(4, [*lonely, member("b", 3)], state=State(), now=101.0) == Replan("uncovered")
    # Until then it may load what it will need.
    assert mend(4, lonely, []) == Join((Slice("a", 0, 3),))


def test_a_gap_beside_pinned_peers_is_mended_where_phase_1_finds_no_way():
    swarm = [member("own", 9, (0, 6), pinned=True), member("gone", 4, (6, 9), leaving=True), member("b", 4)]
    assert mend(9, swarm, [Slice("gone", 6, 9)]) == Join((Slice("b", 5, 9),))


# Between placements


def test_within_the_interval_spares_mend():
    swarm = [member("a", 2, (0, 2)), member("spare", 3)]
    assert decided(5, swarm, state=JUST_PLANNED, now=29.9) == (Join((Slice("spare", 2, 5),)), JUST_PLANNED)
    assert decision(5, swarm, state=JUST_PLANNED, now=30.0) == Replan("uncovered")


def test_spares_do_what_they_can_even_if_it_is_not_enough():
    swarm = [member("a", 2, (0, 2)), member("spare", 2)]
    assert decision(5, swarm, state=JUST_PLANNED, now=1.0) == Join((Slice("spare", 2, 4),))


def test_within_the_interval_peers_that_are_not_needed_mend():
    swarm = [
        member("a", 4, (0, 4)),
        member("big", 3, (0, 2)),
        member("bigger", 4, (0, 3)),
        member("sole", 9, (4, 5)),
    ]
    # 5:8 is nobody's; a and sole are needed where they are, and bigger is the one with the most room.
    assert decision(8, swarm, state=JUST_PLANNED, now=1.0) == Mend((Slice("bigger", 4, 8),))


def test_peers_who_replace_each_other_do_not_both_go():
    swarm = [member("a", 2, (0, 2)), member("b", 2, (0, 2))]
    assert decision(4, swarm, state=JUST_PLANNED, now=1.0) == Mend((Slice("a", 2, 4),))
    # 0:2 would be nobody's if both went, so nobody goes for half a mend.
    assert decision(6, swarm, state=JUST_PLANNED, now=1.0) == Nothing()


def test_each_mends_what_it_can_hold():
    swarm = [
        member("a", 4, (1, 5)),
        member("big", Capacity(5, 0, 2, 0), (1, 3)),
        member("small", 1, (1, 2)),
    ]
    mend = Mend((Slice("big", 4, 6), Slice("small", 0, 1)))
    assert decision(6, swarm, state=JUST_PLANNED, now=1.0) == mend


def test_spares_and_peers_that_are_not_needed_mend_together():
    swarm = [member("a", 2, (0, 2)), member("b", 2, (0, 2)), member("spare", 2)]
    mend = Mend((Slice("spare", 2, 4), Slice("a", 4, 6)))
    assert decision(6, swarm, state=JUST_PLANNED, now=1.0) == mend


@pytest.mark.parametrize(
    "idle",
    [
        member("idle", 9, (0, 2), pinned=True),
        member("idle", Capacity(9, 9, 0, 0), (0, 2)),
        member("idle", 9, (0, 2), leaving=True),
    ],
)
def test_some_cannot_mend(idle):
    swarm = [member("a", 3, (0, 3)), idle]
    assert decision(4, swarm, state=JUST_PLANNED, now=1.0) == Nothing()


# Balance


def uneven(by):
    """Two layers whose loads have this coefficient of variation."""
    return [member("a", 1, (0, 1), power=1 + by), member("b", 1, (1, 2), power=1 - by)]


def test_uneven_loads_need_a_placement():
    assert decided(2, uneven(0.24)) == (Nothing(), State())
    assert decided(2, uneven(0.26)) == (Replan("unbalanced"), State(0.0, 30.0, None))
    assert decision(2, uneven(0.26), state=JUST_PLANNED, now=29.0) == Nothing()
    assert decision(2, uneven(0.26), state=JUST_PLANNED, now=30.0) == Replan("unbalanced")


def test_a_placement_that_helped_little_is_not_repeated():
    _, state = decided(2, uneven(0.6))
    for now in (1.0, 31.0, 1e6):
        answer, state = decided(2, uneven(0.5), state=state, now=now)
        assert answer == Nothing()
    assert state == State(0.0, 30.0, pytest.approx(0.5))
    assert decision(2, uneven(0.74), state=state, now=1e6) == Nothing()
    assert decision(2, uneven(0.76), state=state, now=1e6) == Replan("unbalanced")
    # Once it has been better, more than before is enough.
    _, state = decided(2, uneven(0.3), state=state, now=40.0)
    assert decision(2, uneven(0.54), state=state, now=1e6) == Nothing()
    assert decision(2, uneven(0.56), state=state, now=1e6) == Replan("unbalanced")


def test_loads_must_have_been_even_or_become_much_worse():
    _, state = decided(2, uneven(0.2), state=State(0.0, left=None), now=1.0)
    assert decision(2, uneven(0.44), state=state, now=1e6) == Nothing()
    assert decision(2, uneven(0.46), state=state, now=1e6) == Replan("unbalanced")
    _, state = decided(2, uneven(0.14), state=state, now=2.0)
    assert decision(2, uneven(0.26), state=state, now=1e6) == Replan("unbalanced")


def test_newcomers_come_before_balance():
    swarm = [*uneven(0.9), member("new", 1)]
    assert decision(2, swarm) == Join((Slice("new", 1, 2),))


def test_placements_for_balance_wait_ever_longer_for_each_other():
    now, times, state = 0.0, [], State()
    while now < 1200.0:
        # Even after each placement, uneven again at once.
        answer, state = decided(2, uneven(0.0 if state.left is None else 0.5), state=state, now=now)
        if answer == Replan("unbalanced"):
            times.append(now)
        now += 1.0
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert gaps[:2] == [30.0, 60.0]
    assert set(gaps[2:]) == {100.0}
    # After a long quiet it starts anew.
    quiet = now + 200.0
    _, state = decided(2, uneven(0.5), state=state, now=quiet)
    assert state == State(quiet, 30.0, None)


# Operators


def test_an_operator_is_obeyed_at_once():
    answer, state = decided(2, uneven(0.0), state=State(0.0, 100.0, 0.3), now=1.0, requested=True)
    assert (answer, state) == (Replan("requested"), State(1.0, 0.0, None))
    # The interval counts from there.
    assert decision(2, uneven(0.0)[:1], state=state, now=30.0) == Nothing()
    assert decision(2, uneven(0.0)[:1], state=state, now=31.0) == Replan("uncovered")
