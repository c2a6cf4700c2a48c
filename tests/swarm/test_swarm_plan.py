"""Plans cut into records and put together again, whatever arrives of them and from whom."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from support.bodies import record

from p2pllm.identity import Identity
from p2pllm.records import MAX_RECORD_BYTES, PLAN_ENTRIES, PlanEntry
from p2pllm.swarm.placement.swarm_plan import Assembler, SwarmPlan, to_bodies


def plan(count: int = 1, **changes: Any) -> SwarmPlan:
    entries = tuple(PlanEntry(f"{number:016x}", number, number + 3, number % 5) for number in range(count))
    return replace(SwarmPlan("leader", 7, 3, 2, 5, 1.5, False, entries), **changes)


def assembled(*bodies: Any, signer: str = "leader") -> SwarmPlan | None:
    assembler = Assembler()
    for body in bodies:
        assembler.hear(signer, body)
    return assembler.latest(signer)


def test_a_plan_fits_records_part_by_part() -> None:
    whole = plan(PLAN_ENTRIES + 1, force=True)
    bodies = to_bodies(whole)
    assert [(body.part, body.parts, len(body.entries)) for body in bodies] == [
        (0, 2, PLAN_ENTRIES),
        (1, 2, 1),
    ]
    assert len(record(Identity.generate(), bodies[0]).raw) <= MAX_RECORD_BYTES
    assert whole.entry("0" * 15 + "2" + "f" * 24) == PlanEntry("0" * 15 + "2", 2, 5, 2)
    assert whole.entry("f" * 40) is None


def test_an_empty_plan_is_one_record() -> None:
    assert len(to_bodies(plan(0))) == 1
    assert assembled(*to_bodies(plan(0))) == plan(0)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.integers(0, 150), st.integers(0, 150), st.randoms(use_true_random=False))
def test_parts_in_any_order_make_the_newest_plan(older: int, newer: int, rng: random.Random) -> None:
    new = plan(newer, number=4, score=-0.5, force=True)
    parts = [*to_bodies(plan(older)), *to_bodies(new), *to_bodies(new)]
    rng.shuffle(parts)
    assert assembled(*parts) == new


def test_every_part_is_news_once_for_others_have_it_only_from_those_who_pass_it_on() -> None:
    assembler = Assembler()
    parts = to_bodies(plan(100, number=4))
    assert len(parts) == 4
    assert [assembler.hear("leader", part) for part in parts[:3]] == [True] * 3
    assert [assembler.hear("leader", part) for part in parts[:3]] == [False] * 3
    assert [assembler.hear("leader", part) for part in parts] == [False] * 3 + [True]
    assert assembler.latest("leader") == plan(100, number=4)
    assert not any(assembler.hear("leader", part) for part in (*parts, *to_bodies(plan(40))))
    assert [assembler.hear("leader", part) for part in to_bodies(plan(40, number=5))] == [True] * 2


def test_a_plan_with_a_part_missing_is_none_and_the_one_before_stands() -> None:
    old, new = plan(40), plan(70, number=4)
    assert assembled(*to_bodies(old), *to_bodies(new)[1:]) == old
    assert assembled(*to_bodies(new)[1:], *to_bodies(old)) == old


def test_parts_that_do_not_belong_together_are_not_mixed() -> None:
    first, second = to_bodies(plan(40))
    assert assembled(first, replace(second, force=True)) is None
    assert assembled(first, replace(second, parts=3)) is None
    assert assembled(first, replace(second, score=9.0), second) == plan(40)


def test_a_peer_has_one_entry_at_most() -> None:
    entry = PlanEntry("0" * 16, 0, 3, 0)
    twice = replace(to_bodies(plan(1))[0], entries=(entry, replace(entry, end=4)))
    found = assembled(twice)
    assert found is not None
    assert len(found.slices) == 1


def test_strangers_cannot_fill_the_memory_or_push_the_leader_out() -> None:
    assembler = Assembler()
    first, second = to_bodies(plan(40))
    assembler.hear("leader", first)
    for number in range(50):
        assembler.hear(f"stranger {number}", first, leader="leader")
        assembler.hear("loud", replace(first, number=number), leader="leader")
    assembler.hear("leader", second)
    assert assembler.latest("leader") == plan(40)
    assert len(assembler._signers) <= 5
    assert sum(len(signer.drafts) for signer in assembler._signers.values()) <= 10


def test_plans_are_ordered_by_epoch_then_leader_then_number() -> None:
    keys = [plan(epoch=1, leader="b", number=9).key, plan(epoch=2, leader="a", number=1).key]
    keys += [plan(epoch=2, leader="a", number=2).key, plan(epoch=2, leader="b", number=1).key]
    assert keys == sorted(keys)
