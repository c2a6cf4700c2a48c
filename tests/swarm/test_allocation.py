"""One peer and its slice: fences, make before break, and what makes it wait. By hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.states import full, plan_of, state

from p2pllm.records import MAX_EPOCH, Span
from p2pllm.scheduling import Capacity, Slice
from p2pllm.swarm.placement.allocation import Allocation, Drop, Load
from p2pllm.swarm.view import PeerState

LAYERS = 12


def allocation(name: str = "me", room: int = LAYERS, **options: object) -> Allocation:
    return Allocation(full(name), LAYERS, Capacity.same(room), **options)


def nobody(start: int, end: int) -> int:
    return 0


def load(start: int, end: int, name: str = "me") -> Load:
    return Load(Slice(full(name), start, end))


def drop(start: int, end: int, name: str = "me") -> Drop:
    return Drop(Slice(full(name), start, end))


def settled(mine: Allocation, *spans: tuple[int, int]) -> Allocation:
    """It holds these layers, by whatever plans."""
    for span in spans:
        mine.loaded(Slice(full("me"), *span))
        mine.target = Slice(full("me"), *span)
    return mine


def shown(mine: Allocation) -> list[tuple[int, int, str]]:
    return [(span.start, span.end, span.state) for span in mine.spans()]


def test_a_slice_is_loaded_announced_and_done() -> None:
    mine = allocation()
    assert mine.spans() == ()
    assert mine.follow(plan_of(me=(2, 9)))
    assert mine.generation == 1
    assert mine.step(0.0, [], nobody) == (load(2, 9),)
    assert mine.spans() == (Span(2, 9, "loading"),)
    assert mine.step(1.0, [], nobody) == ()
    mine.loaded(Slice(full("me"), 2, 9))
    assert mine.spans() == (Span(2, 9, "ready"),)
    assert mine.step(2.0, [], nobody) == ()
    assert mine.generation == 1


def test_only_higher_plans_for_its_own_generation_move_it() -> None:
    mine = allocation()
    assert mine.follow(plan_of(5, epoch=3, leader="m", me=(0, 4)))
    for stale in (
        plan_of(5, epoch=3, leader="m", me=(4, 8, 1)),
        plan_of(4, epoch=3, leader="m", me=(4, 8, 1)),
        plan_of(9, epoch=3, leader="a", me=(4, 8, 1)),
        plan_of(9, epoch=2, leader="z", me=(4, 8, 1)),
    ):
        assert not mine.follow(stale)
    assert not mine.follow(plan_of(6, epoch=3, leader="m", me=(4, 8, 0))), "made for an earlier generation"
    assert not mine.follow(plan_of(7, epoch=3, leader="m", other=(4, 8)))
    assert mine.target == Slice(full("me"), 0, 4)
    assert mine.follow(plan_of(1, epoch=4, leader="a", me=(4, 8, 1)))
    assert (mine.target, mine.generation) == (Slice(full("me"), 4, 8), 2)
    assert not mine.follow(plan_of(2, epoch=4, leader="a", me=(4, 8, 2))), "the same slice again"
    assert mine.generation == 2


def test_plans_that_do_not_fit_change_nothing() -> None:
    mine = Allocation(full("me"), LAYERS, Capacity(6, 4, 5, 3))
    assert not mine.follow(plan_of(1, me=(0, 5)))
    assert not mine.follow(plan_of(2, me=(8, LAYERS + 1)))
    assert not mine.follow(plan_of(3, me=(1, 8)))
    assert (mine.target, mine.generation) == (None, 0)
    assert mine.follow(plan_of(4, me=(0, 4)))


def test_in_the_last_epoch_whoever_leads_is_believed() -> None:
    mine = allocation()
    mine.follow(plan_of(2**62, epoch=MAX_EPOCH, leader="z", me=(0, 4)))
    assert mine.follow(plan_of(1, epoch=MAX_EPOCH, leader="a", me=(4, 8, 1)))


def test_it_loads_what_is_missing_then_says_what_it_drops_then_drops() -> None:
    mine = settled(allocation(), (0, 8))
    other = state("other", 8, (0, 6))
    assert mine.follow(plan_of(me=(4, 12)))
    assert mine.step(0.0, [other], nobody) == (load(8, 12),)
    assert shown(mine) == [(0, 8, "ready"), (8, 12, "loading")]
    mine.loaded(Slice(full("me"), 8, 12))
    assert mine.step(5.0, [other], nobody) == ()
    assert shown(mine) == [(0, 4, "draining"), (4, 12, "ready")]
    assert mine.step(6.9, [other], nobody) == ()
    assert mine.step(7.0, [other], nobody) == (drop(0, 4),)
    assert mine.step(7.1, [other], nobody) == ()
    mine.dropped(Slice(full("me"), 0, 4))
    assert shown(mine) == [(4, 12, "ready")]


def test_a_sole_holder_keeps_its_layers_until_another_is_ready() -> None:
    mine = settled(allocation(), (0, 8))
    mine.follow(plan_of(me=(4, 8)))
    for others in (
        [],
        [state("other", 8, (0, 3))],
        [state("other", 8, (0, 4, "loading"))],
        [state("other", 8, (0, 4, "draining"))],
        [state("other", 8, (0, 4), leaving=True)],
        [state("other", 8, (0, 4), paused=True)],
    ):
        assert mine.step(0.0, others, nobody) == ()
        assert shown(mine) == [(0, 8, "ready")]
    mine.step(1.0, [state("other", 8, (0, 4))], nobody)
    assert shown(mine) == [(0, 4, "draining"), (4, 8, "ready")]


def test_it_takes_its_word_back_when_the_other_holder_goes() -> None:
    mine = settled(allocation(), (0, 8))
    mine.follow(plan_of(me=(4, 8)))
    mine.step(0.0, [state("other", 8, (0, 4))], nobody)
    assert mine.step(1.0, [], nobody) == ()
    assert shown(mine) == [(0, 8, "ready")]


def test_it_does_not_drop_before_it_has_news_of_the_other_holder() -> None:
    mine = settled(allocation(), (0, 8))
    mine.follow(plan_of(me=(4, 8)))
    mine.step(10.0, [state("other", 8, (0, 4), heard_s=9.5)], nobody)
    assert mine.step(13.0, [state("other", 8, (0, 4), heard_s=9.5)], nobody) == ()
    assert mine.step(13.2, [state("other", 8, (0, 4), heard_s=13.1)], nobody) == (drop(0, 4),)


@pytest.mark.parametrize(("rival", "goes_on"), [("aa", True), ("zz", False)])
def test_of_two_that_drain_the_same_layers_the_lower_id_takes_it_back(rival: str, goes_on: bool) -> None:
    mine = settled(allocation(), (0, 8))
    mine.follow(plan_of(me=(4, 8)))
    mine.step(0.0, [state(rival, 8, (0, 4))], nobody)
    assert mine.step(3.0, [state(rival, 8, (0, 4, "draining"))], nobody) == ()
    assert (shown(mine) == [(0, 4, "draining"), (4, 8, "ready")]) == goes_on
    # The other one has taken it back, or is gone with its layers.
    assert mine.step(4.0, [state(rival, 8, (0, 4))], nobody) == ((drop(0, 4),) if goes_on else ())


def test_sessions_are_waited_for_but_not_for_ever() -> None:
    mine = settled(allocation(grace_s=20.0), (0, 8))
    asked: list[tuple[int, int]] = []

    def busy(start: int, end: int) -> int:
        asked.append((start, end))
        return 1

    other = [state("other", 8, (0, 4))]
    mine.follow(plan_of(me=(4, 8)))
    mine.step(0.0, other, busy)
    assert mine.step(19.9, other, busy) == ()
    assert asked[-1] == (0, 4)
    assert mine.step(20.0, other, busy) == (drop(0, 4),)


def test_where_old_and_new_do_not_fit_it_drops_first_if_others_hold_that() -> None:
    mine = settled(allocation(room=6), (0, 6))
    mine.follow(plan_of(me=(6, 12)))
    assert mine.step(0.0, [], nobody) == ()
    assert shown(mine) == [(0, 6, "ready")]
    other = [state("other", 8, (0, 6))]
    mine.step(1.0, other, nobody)
    assert shown(mine) == [(0, 6, "draining")]
    assert mine.step(3.0, other, nobody) == (drop(0, 6),)
    mine.dropped(Slice(full("me"), 0, 6))
    assert mine.step(3.1, other, nobody) == (load(6, 12),)


def test_force_drops_what_nobody_else_holds_only_where_there_is_no_other_way() -> None:
    mine = settled(allocation(room=6), (0, 6))
    mine.follow(plan_of(me=(6, 12), force=True))
    assert mine.step(0.0, [], nobody) == (drop(0, 6),)
    mine = settled(allocation(room=LAYERS), (0, 6))
    mine.follow(plan_of(me=(6, 12), force=True))
    assert mine.step(0.0, [], nobody) == (load(6, 12),)
    mine.loaded(Slice(full("me"), 6, 12))
    assert mine.step(9.0, [], nobody) == ()
    assert shown(mine) == [(0, 12, "ready")]


def test_a_failed_load_is_said_and_tried_again_ever_later() -> None:
    mine = allocation()
    mine.follow(plan_of(me=(0, 4)))
    now = 0.0
    for wait in (2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0):
        generation = mine.generation
        assert mine.step(now, [], nobody) == (load(0, 4),)
        mine.failed(Slice(full("me"), 0, 4), now)
        assert (mine.spans(), mine.generation) == ((), generation + 1)
        assert mine.step(now + wait - 0.1, [], nobody) == ()
        now += wait
    assert mine.follow(plan_of(2, me=(4, 8, mine.generation)))
    assert mine.step(now - 60.0, [], nobody) == (load(4, 8),), "another slice need not wait"


def test_a_change_of_plan_while_it_loads() -> None:
    mine = allocation()
    mine.follow(plan_of(me=(0, 4)))
    mine.step(0.0, [], nobody)
    mine.follow(plan_of(2, me=(2, 8, 1)))
    assert mine.step(0.1, [], nobody) == (), "one load after the other"
    mine.loaded(Slice(full("me"), 0, 4))
    assert mine.step(0.2, [], nobody) == (load(4, 8),)


def test_layers_that_are_wanted_again_are_kept() -> None:
    mine = settled(allocation(), (0, 8))
    other = [state("other", 8, (0, 4))]
    mine.follow(plan_of(me=(4, 8)))
    mine.step(0.0, other, nobody)
    mine.follow(plan_of(2, me=(0, 8, 1)))
    assert mine.step(3.0, other, nobody) == ()
    assert shown(mine) == [(0, 8, "ready")]


def test_layers_wanted_again_while_they_are_dropped_are_loaded_afterwards() -> None:
    mine = settled(allocation(), (0, 8))
    other = [state("other", 8, (0, 4))]
    mine.follow(plan_of(me=(4, 8)))
    mine.step(0.0, other, nobody)
    assert mine.step(2.0, other, nobody) == (drop(0, 4),)
    mine.follow(plan_of(2, me=(0, 8, 1)))
    assert mine.step(2.1, other, nobody) == ()
    assert shown(mine) == [(0, 4, "draining"), (4, 8, "ready")]
    mine.dropped(Slice(full("me"), 0, 4))
    assert mine.step(2.2, other, nobody) == (load(0, 4),)


def test_a_pinned_peer_takes_its_layers_and_no_plan() -> None:
    mine = allocation(pinned=(3, 7))
    assert mine.step(0.0, [], nobody) == (load(3, 7),)
    mine.loaded(Slice(full("me"), 3, 7))
    assert not mine.follow(plan_of(me=(0, 4)))
    assert mine.step(9.0, [], nobody, 99.0) == ()
    assert (mine.generation, shown(mine)) == (0, [(3, 7, "ready")])


def test_a_paused_peer_hands_its_layers_over_and_then_drops_them() -> None:
    mine = settled(allocation(), (0, 8))
    mine.pause()
    assert mine.generation == 1
    assert mine.step(0.0, [state("other", 8, (0, 7))], nobody) == ()
    assert shown(mine) == [(0, 8, "ready")], "one layer would have no holder"
    other = [state("other", 8, (0, 8), heard_s=3.0)]
    assert mine.step(1.0, other, lambda start, end: 2) == ()
    assert shown(mine) == [(0, 8, "draining")]
    assert not mine.follow(plan_of(me=(0, 4, 1)))
    assert mine.step(4.0, other, lambda start, end: 2) == (), "sessions go on"
    assert mine.step(5.0, other, nobody) == (drop(0, 8),)
    mine.dropped(Slice(full("me"), 0, 8))
    assert mine.spans() == ()
    assert mine.step(6.0, [], nobody, 99.0) == ()
    mine.resume()
    assert mine.generation == 2
    assert mine.follow(plan_of(me=(0, 4, 2)))


def test_a_pause_does_not_wait_for_ever() -> None:
    mine = settled(allocation(), (0, 8))
    mine.pause()
    assert mine.step(0.0, [], lambda start, end: 2) == ()
    assert mine.step(29.0, [], lambda start, end: 2) == ()
    assert shown(mine) == [(0, 8, "ready")]
    assert mine.step(30.0, [], lambda start, end: 2) == (drop(0, 8),)


def test_a_pinned_peer_that_resumes_takes_its_layers_again() -> None:
    mine = allocation(pinned=(3, 7))
    mine.pause()
    assert mine.step(0.0, [], nobody) == ()
    mine.resume()
    assert mine.step(1.0, [], nobody) == (load(3, 7),)


def test_without_a_leader_a_peer_takes_the_lightest_window() -> None:
    others: Sequence[PeerState] = [
        state("a", 8, (0, 6)),
        state("b", 8, (8, 12, "loading")),
        state("me", 5),
        state("new", 12),
    ]
    mine = allocation(room=5)
    assert mine.step(0.0, others, nobody, 5.9) == ()
    assert mine.step(0.1, others, nobody, 6.0) == (load(6, 11),)
    assert mine.generation == 1
    assert mine.step(0.2, others, nobody, 6.1) == ()
    assert allocation(room=0).step(0.1, [state("me", 0)], nobody, 9.0) == ()


def test_of_a_slice_in_many_pieces_a_record_never_tells_more_than_it_can() -> None:
    mine = settled(allocation(), (0, 2), (5, 7))
    other = [state("other", 12, (0, 12))]
    mine.follow(plan_of(me=(10, 12)))
    assert mine.step(0.0, other, nobody) == (), "a third piece waits for one to go"
    assert shown(mine) == [(0, 2, "draining"), (5, 7, "draining")]
    assert mine.step(2.0, other, nobody) == (drop(0, 2), drop(5, 7))
    mine.dropped(Slice(full("me"), 0, 2))
    mine.dropped(Slice(full("me"), 5, 7))
    assert mine.step(2.1, other, nobody) == (load(10, 12),)


def test_a_middle_part_that_is_wanted_back_while_it_drains_is_told_of_in_parts() -> None:
    mine = settled(allocation(), (0, 5), (8, 10))
    other = [state("other", 12, (0, 12))]
    mine.step(0.0, other, nobody)
    assert shown(mine) == [(0, 5, "draining"), (8, 10, "ready")]
    mine.follow(plan_of(me=(2, 4)))
    mine.step(0.5, other, nobody)
    assert shown(mine) == [(0, 2, "draining"), (2, 5, "ready"), (8, 10, "draining")]
    assert mine.step(2.4, other, nobody) == (), "what was said before counts no more"


def test_a_middle_part_is_freed_piece_by_piece() -> None:
    mine = settled(allocation(), (0, 5), (8, 10))
    other = [state("other", 12, (0, 12))]
    mine.follow(plan_of(me=(2, 4)))
    mine.step(0.0, other, nobody)
    assert shown(mine) == [(0, 2, "draining"), (2, 5, "ready"), (8, 10, "draining")]
    assert mine.step(2.0, other, nobody) == (drop(0, 2), drop(8, 10))
    mine.dropped(Slice(full("me"), 0, 2))
    mine.dropped(Slice(full("me"), 8, 10))
    mine.step(2.1, other, nobody)
    assert shown(mine) == [(2, 4, "ready"), (4, 5, "draining")]
