"""Whose prompts are read in a step, and who may have how much waiting."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pllm.errors import BusyError
from p2pllm.execution import waiting as module
from p2pllm.execution.job import Job, Session
from p2pllm.execution.kv import SessionCache
from p2pllm.execution.reservations import Reservation
from p2pllm.execution.waiting import Waiting
from p2pllm.execution.work import Work


def session(owner: str) -> Session:
    store: Any = None
    return Session(SessionCache(store, {}), Reservation(owner, 0, 1, {}, {}), None)


def job(it: Session, rows: int) -> Job:
    nobody: Any = None
    return Job(it, Work(it.cache, {}, 0, 1, 0, [1] * rows, None), nobody, 0.0)


def read(waiting: Waiting, rows: int) -> Counter[str]:
    """One step; returns how many rows each owner got."""
    got: Counter[str] = Counter()
    for it, part in waiting.deal(rows):
        assert waiting.take(it, part).count == part
        got[it.session.owner] += part
    return got


def test_one_prompt_beside_fifty_of_another_gets_half_of_each_step() -> None:
    """200 rows at 32 of 64 in a step: six steps, and 8 rows in the seventh; the other takes what is left."""
    waiting = Waiting()
    for _ in range(50):
        waiting.add(job(session("flood:float16"), 200))
    waiting.add(job(session("one:float16"), 200))
    steps = [read(waiting, 64) for _ in range(8)]
    assert [(step["flood"], step["one"]) for step in steps] == [(32, 32)] * 6 + [(56, 8), (64, 0)]


def test_how_an_entry_rounds_makes_it_no_second_owner() -> None:
    waiting = Waiting()
    for owner in ("a:", "a:float16", "a:int8", "b:"):
        waiting.add(job(session(owner), 100))
    assert read(waiting, 40) == {"a": 20, "b": 20}


def test_too_many_owners_for_one_step_take_turns() -> None:
    """At 16 rows each there is room for two of five in a step."""
    waiting = Waiting()
    for owner in "abcde":
        waiting.add(job(session(owner), 100))
    steps = [read(waiting, 32) for _ in range(5)]
    assert steps == [dict.fromkeys(pair, 16) for pair in ("ab", "cd", "ea", "bc", "de")]


def test_an_owners_sessions_take_turns() -> None:
    waiting = Waiting()
    jobs = [job(session("a"), rows) for rows in (100, 10, 100)]
    for it in jobs:
        waiting.add(it)
    dealt = []
    for _ in range(4):
        step = waiting.deal(60)
        dealt.append([(jobs.index(it), part) for it, part in step])
        for it, part in step:
            waiting.take(it, part)
    assert dealt == [[(0, 60)], [(1, 10), (2, 50)], [(0, 40), (2, 20)], [(2, 30)]]


def test_who_floods_is_refused_and_others_get_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 runs the first owner gets half, the second half of the rest, and so on."""
    monkeypatch.setattr(module, "_MAX_RUNS", 16)
    waiting = Waiting()
    admitted = []
    for owner in "abcd":
        it = session(owner)
        for count in range(20):
            try:
                waiting.check_room(owner, 1)
            except BusyError:
                admitted.append(count)
                break
            waiting.add(job(it, 1))
    assert admitted == [8, 4, 2, 1]


def test_rows_are_bounded_too_but_not_of_a_single_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_ROWS", 1000)
    waiting = Waiting()
    one, two = session("a"), session("b")
    waiting.add(job(one, 400))
    waiting.check_room("a", 100)
    with pytest.raises(BusyError):
        waiting.check_room("a", 101)
    read(waiting, 150)  # 250 are left
    waiting.check_room("a", 250)
    with pytest.raises(BusyError):
        waiting.check_room("a", 251)
    (half_read,) = waiting.of(one)
    waiting.add(job(one, 150))
    waiting.remove(half_read)
    waiting.check_room("a", 350)
    with pytest.raises(BusyError):
        waiting.check_room("a", 351)
    waiting.check_room("b", 5000)
    waiting.add(job(two, 5000))
    for owner in "ab":
        with pytest.raises(BusyError):
            waiting.check_room(owner, 1)
    waiting.check_room("c", 1)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from("abcd"), st.integers(0, 2), st.integers(1, 150)),
            st.integers(1, 120),
        ),
        max_size=60,
    )
)
@settings(max_examples=150, deadline=None)
def test_all_get_equally_much_unless_they_want_less(acts: list[tuple[str, int, int] | int]) -> None:
    """Against lists: of owners in order of turns, of their sessions likewise, and of rows left of each job.

    A step's rows are given one by one, each to whoever has had fewest of those that still want some. Where
    rows do not come out even, it is open who gets one more.
    """
    waiting = Waiting()
    sessions = {(owner, number): session(owner) for owner in "abcd" for number in range(3)}
    names = {it: name for name, it in sessions.items()}
    order: list[str] = []
    model: dict[str, list[tuple[Session, list[list[int]]]]] = {owner: [] for owner in "abcd"}

    def firsts(owner: str) -> list[tuple[Session, list[int]]]:
        return [(it, jobs[0]) for it, jobs in model[owner] if jobs[0][0] > 1]

    for act in acts:
        if isinstance(act, tuple):
            owner, number, rows = act
            it = sessions[owner, number]
            waiting.add(job(it, rows))
            if owner not in order:
                order.append(owner)
            queued = next((jobs for other, jobs in model[owner] if other is it), None)
            if queued is None:
                queued = []
                model[owner].append((it, queued))
            queued.append([rows, rows])
        else:
            wanted: Counter[str] = Counter()
            for owner in order:
                if sum(min(16, rows) for rows in wanted.values()) < act:
                    wanted[owner] = sum(left for _, (_, left) in firsts(owner))
            wanted = +wanted
            fair = Counter(dict.fromkeys(wanted, 0))
            for _ in range(min(act, wanted.total())):
                fair[min((one for one in wanted if fair[one] < wanted[one]), key=fair.__getitem__)] += 1
            dealt = waiting.deal(act)
            got = Counter(dict.fromkeys(wanted, 0))
            for piece, part in dealt:
                got[piece.session.owner] += part
                waiting.take(piece, part)
            assert got.total() == fair.total()
            assert all(abs(got[owner] - fair[owner]) <= 1 for owner in wanted | got)
            for owner in wanted:
                order.remove(owner)
                order.append(owner)
                rest = got[owner]
                expected = []
                for it, entry in firsts(owner):
                    part = min(rest, entry[1])
                    if part:
                        expected.append((names[it], part))
                        entry[1] -= part
                        rest -= part
                        place = next(i for i, (other, _) in enumerate(model[owner]) if other is it)
                        model[owner].append(model[owner].pop(place))
                theirs = [(names[piece.session], part) for piece, part in dealt]
                assert [name_part for name_part in theirs if name_part[0][0] == owner] == expected
                for _, jobs in model[owner]:
                    if jobs[0][1] == 0:
                        jobs.pop(0)
                model[owner] = [(it, jobs) for it, jobs in model[owner] if jobs]
                if not model[owner]:
                    order.remove(owner)
        everything = [entry for queues in model.values() for _, jobs in queues for entry in jobs]
        assert waiting.runs == len(everything)
        assert sum(it.left for it in waiting) == sum(left for _, left in everything)
        assert waiting.sessions == {it for queues in model.values() for it, _ in queues}
