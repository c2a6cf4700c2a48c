"""Who computes and who sends what again, and who stays, when a chain changes."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from p2pllm.scheduling import Stage
from p2pllm.serving.entry.rerouting import resumption, survivors

STAGES = tuple(Stage(peer, 2 * index, 2 * index + 2) for index, peer in enumerate("abcde"))
RESUME = 12

held = st.lists(st.integers(0, RESUME + 5), min_size=1, max_size=5)
peers = st.sets(st.sampled_from("abcde"))
hops = st.sets(
    st.tuples(st.sampled_from("abcde"), st.sampled_from("abcde")).filter(lambda it: it[0] != it[1])
)


@given(held)
def test_every_stage_gets_what_it_lacks_and_nothing_else(counts: list[int]) -> None:
    plan = resumption(STAGES[: len(counts)], counts, RESUME)
    begins = [min(count, RESUME) for count in counts]
    arriving = [*range(plan.feed_from, RESUME + 1)]
    computed = 0
    for begin, first, stage in zip(begins, plan.forward_from, STAGES, strict=False):
        assert arriving == [*range(begin, RESUME + 1)], "each begins where it is, and lacks nothing between"
        computed += len(arriving) * (stage.end - stage.start)
        # What was sent before is sent again first, then what has just been computed.
        arriving = [*range(first, begin), *(position for position in arriving if position >= first)]
    assert plan.recomputed == computed - 2 * len(counts), "but for the token at which it goes on"


def test_a_replaced_stage_is_all_that_is_computed_again() -> None:
    plan = resumption((Stage("a", 0, 3), Stage("new", 3, 7), Stage("c", 7, 8)), (9, 0, 9), 9)
    assert (plan.feed_from, plan.forward_from, plan.recomputed) == (9, (0, 9, 9), 4 * 9)
    # Of the new one, 4 tokens are kept from another session; the last is a token short.
    plan = resumption((Stage("a", 0, 3), Stage("new", 3, 7), Stage("c", 7, 8)), (20, 4, 8), 9)
    assert (plan.feed_from, plan.forward_from, plan.recomputed) == (9, (4, 8, 9), 4 * 5 + 1)


@given(peers, hops, peers)
def test_who_stays_can_reach_its_neighbours(
    lost: set[str], complaints: set[tuple[str, str]], newcomers: set[str]
) -> None:
    new = [stage for stage in STAGES if stage.peer in newcomers]
    kept = survivors(STAGES, lost=lost, complaints=complaints, newcomers=new)
    assert [*kept] == [stage for stage in STAGES if stage in kept]
    assert not lost & {stage.peer for stage in kept}
    for first, second in itertools.pairwise([*STAGES, STAGES[0]]):
        if first in kept and second in kept:
            assert not {(first.peer, second.peer), (second.peer, first.peer)} & complaints
    gone = {stage.peer for stage in STAGES} - lost - {stage.peer for stage in kept}
    assert all(any(peer in hop for hop in complaints) for peer in gone), "for nothing nobody goes"


def test_the_accused_goes_unless_the_complainer_holds_less() -> None:
    def kept(*complaints: tuple[str, str], new: str = "") -> str:
        newcomers = [stage for stage in STAGES if stage.peer in new]
        stages = survivors(STAGES, lost=(), complaints=complaints, newcomers=newcomers)
        return "".join(stage.peer for stage in stages)

    assert kept(("a", "b")) == "acde"
    assert kept(("b", "a")) == "bcde"
    assert kept(("a", "b"), new="a") == "bcde"
    assert kept(("a", "b"), new="ab") == "acde"
    assert kept(("e", "a")) == "bcde", "around the ring"
    assert kept(("a", "c")) == "abcde", "no neighbours"
    assert kept(("a", "b"), ("c", "b")) == "acde"
    assert survivors((), lost=(), complaints=()) == ()
