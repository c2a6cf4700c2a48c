"""Stages among many entries: who is refused when it gets crowded, and who never is."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bounded import BLOCKS, LAYERS, stats_of
from support.one_stage import SEATS, OneStage

from p2pllm.serving.stage.entry_shares import crowded_out, over_share
from p2pllm.transport import Open

A, B, C = (digit * 40 for digit in "abc")
PLAN = Open(
    session="s",
    stage=0,
    entry=A,
    generation=0,
    stages=((C, 0, 10),),
    reserve=160,
    limit=1000,
    lease_s=10.0,
    eos=(),
    temperature=0.0,
    top_p=1.0,
    top_k=0,
    seed=0,
)
STATS = stats_of(BLOCKS)


def filled(entries: str, total: int) -> Counter[str]:
    """What each has when they ask in turns, one piece a time, until nobody gets any more."""
    used: Counter[str] = Counter()
    refused: set[str] = set()
    while len(refused) < len(set(entries)):
        for entry in entries:
            free = total - used.total()
            if free < 1 or over_share(entry, 1, used, free=free, total=total):
                refused.add(entry)
            else:
                used[entry] += 1
    return used


def test_one_alone_gets_all_but_what_is_kept() -> None:
    assert filled("a", 100) == {"a": 90}


def test_who_asks_as_often_gets_as_much() -> None:
    assert filled("ab", 100) == {"a": 45, "b": 45}


def test_who_asks_late_still_gets_in() -> None:
    used = Counter(a=90)
    while not over_share("b", 1, used, free=100 - used.total(), total=100) and used.total() < 100:
        used["b"] += 1
    assert used["b"] == 10
    assert over_share("a", 1, used, free=0, total=100)


def test_who_had_all_gives_way_as_its_sessions_end() -> None:
    used = Counter(a=90)
    for _ in range(300):
        for who in "ab":
            used[who] -= used[who] > 0 and who == max(used, key=lambda entry: used[entry])
        for who in "ab":
            free = 100 - used.total()
            used[who] += free >= 1 and not over_share(who, 1, +used, free=free, total=100)
    assert min(used["a"], used["b"]) >= 30


@settings(derandomize=True, deadline=None)
@given(
    used=st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 50)),
    free=st.integers(0, 50),
    wanted=st.integers(1, 20),
)
def test_only_who_has_more_than_an_equal_part_is_refused(
    used: dict[str, int], free: int, wanted: int
) -> None:
    total = sum(used.values()) + free
    for who in "abcdefg":
        if over_share(who, wanted, used, free=free, total=total):
            assert used[who] + wanted > (total - free + wanted) / (len(used) + 1)
            assert free - wanted < 0.1 * total
        elif free - wanted < 0.1 * total:
            assert used.get(who, 0) * (len(used) + 1) <= total


def test_a_stage_counts_sessions_and_kv_cache_by_entry() -> None:
    by_b, by_c = replace(PLAN, entry=B), replace(PLAN, entry=C, reserve=4096)
    ours = [PLAN] * 60
    both = [*ours, *[replace(by_b, reserve=16)] * 30]
    assert crowded_out(PLAN, ours, STATS, 100) == ""
    assert "sessions" in crowded_out(PLAN, both, STATS, 100)
    assert "sessions" in crowded_out(PLAN, ours, STATS, 66)
    few = stats_of(105)
    assert "KV cache" in crowded_out(PLAN, both, few, 1000)
    assert crowded_out(by_b, both, few, 1000) == "", "B has a twentieth"
    assert crowded_out(by_c, both, few, 1000) == "", "C has nothing"


@pytest.mark.parametrize(("blocks", "share"), [(BLOCKS, SEATS - 1), (BLOCKS // 10, 1)])
def test_near_full_a_stage_refuses_who_has_its_share_and_takes_in_who_has_nothing(
    blocks: int, share: int
) -> None:
    """Of four seats the last is for others; where a tenth of the KV cache is left, all that is left."""
    it = OneStage(C)
    it.executor.blocks_free = blocks
    plan = replace(PLAN, stages=((C, 0, LAYERS),), reserve=16)
    try:
        for number in range(SEATS):
            it.deliver(A, replace(plan, session=f"{number}{A}"))
        assert [seat.entry for seat in it.seats] == [A] * share
        it.deliver(B, replace(plan, session=f"s{B}", entry=B))
        assert [seat.entry for seat in it.seats] == [A] * share + [B]
        it.check()
    finally:
        it.close()
