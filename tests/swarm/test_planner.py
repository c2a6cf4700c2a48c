"""What a leader plans from its view, and when. By hand, or by the functions that the plan command runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from support.states import full, plan_of, state

from p2pllm.errors import ModelError
from p2pllm.records import PlanEntry
from p2pllm.scheduling import Assignment, Capacity, Network, Pipeline, Plan, Slice, place
from p2pllm.swarm.latency import UNMEASURED, latency_of
from p2pllm.swarm.placement.members import Roster, assignment_of, offer_of
from p2pllm.swarm.placement.placing import Question, place_now
from p2pllm.swarm.placement.planner import NewPlan, Planner
from p2pllm.swarm.placement.swarm_plan import SwarmPlan
from p2pllm.swarm.view import PeerState

LAYERS = 12


def unmeasured() -> Network:
    return UNMEASURED


def planner(epoch: int = 1, **options: int) -> Planner:
    return Planner(full("me"), LAYERS, epoch, **options)


def planned(states: Sequence[PeerState], current: SwarmPlan | None = None) -> NewPlan | None:
    """What a new leader plans once it does not wait for more peers."""
    mine = planner()
    return mine.plan(0.0, states, unmeasured, current) or mine.plan(0.3, states, unmeasured, current)


def slices(news: NewPlan | None) -> dict[str, tuple[int, int]]:
    assert news is not None
    assert news.plan is not None
    return {entry.peer.rstrip("0"): (entry.start, entry.end) for entry in news.plan.slices}


def following(plan: SwarmPlan, states: Sequence[PeerState]) -> list[PeerState]:
    """The same peers when they hold what the plan gives them."""
    entries = {entry.peer: entry for entry in plan.slices}
    return [
        state(
            each.peer.rstrip("0"),
            Capacity(*each.body.capacity),
            (entries[each.peer[:16]].start, entries[each.peer[:16]].end),
            generation=entries[each.peer[:16]].generation + 1,
        )
        for each in states
    ]


def test_a_first_peer_has_its_plan_within_a_second() -> None:
    mine = planner()
    alone = [state("a", LAYERS, generation=4)]
    assert mine.plan(50.0, alone, unmeasured, None) is None
    assert mine.waits
    assert mine.plan(50.29, alone, unmeasured, None) is None
    news = mine.plan(50.31, alone, unmeasured, None)
    assert news is not None
    assert (news.reason, news.problem) == ("uncovered", "")
    assert news.plan == SwarmPlan(
        full("me"),
        1,
        1,
        1,
        1,
        news.plan.score if news.plan else 0.0,
        True,
        (PlanEntry("a" + "0" * 15, 0, 12, 4),),
    )


def test_peers_that_start_together_are_placed_together_but_the_first_does_not_wait_for_ever() -> None:
    mine = planner()
    everybody = [state(name, LAYERS) for name in "abcdef"]
    for tenth in range(8):
        assert mine.plan(tenth / 10, everybody[: tenth // 2 + 1], unmeasured, None) is None
    news = mine.plan(0.8, everybody[:5], unmeasured, None)
    assert set(slices(news)) == set("abcde")


def test_the_placement_is_the_one_that_the_plan_command_makes() -> None:
    states = [
        state(name, room, region=region, layer_s=layer_s, head_s=3e-3)
        for name, room, region, layer_s in (
            ("a", 5, "eu", 1e-3),
            ("b", 4, "eu", 2e-3),
            ("c", Capacity(9, 7, 8, 6), "us", 1e-3),
            ("d", 7, "eu", 4e-3),
            ("e", 6, "us", 1e-3),
            ("f", 3, "us", 1e-3),
        )
    ]
    measured = replace(states[0], metrics=replace(states[0].metrics, rho=((full("b")[:16], 0.004),)))
    states[0] = measured
    network = latency_of(states)
    offers = [offer for each in states if (offer := offer_of(each)) is not None]
    expected = place(LAYERS, offers, network)
    mine = planner()
    mine.plan(0.0, states, lambda: network, None)
    news = mine.plan(0.3, states, lambda: network, None)
    assert news is not None
    assert news.plan is not None
    assert (news.plan.replicas, news.plan.stages, news.plan.score) == (
        expected.k,
        expected.stages,
        expected.z,
    )
    assert slices(news) == {p.peer.rstrip("0"): (p.start, p.end) for p in expected.assignment.slices}


def test_what_is_missing_is_said_once_and_who_can_hold_something_loads_meanwhile() -> None:
    mine = planner()
    few = [state("a", 4), state("b", 3)]
    mine.plan(0.0, few, unmeasured, None)
    news = mine.plan(0.3, few, unmeasured, None)
    assert news is not None
    assert "5 layers are missing" in news.problem
    assert slices(news) == {"a": (0, 4), "b": (4, 7)}
    assert news.plan is not None
    assert mine.plan(1.0, few, unmeasured, news.plan) is None
    more = [*following(news.plan, few), state("c", 5)]
    mine.plan(2.0, more, unmeasured, news.plan)
    last = mine.plan(2.4, more, unmeasured, news.plan)
    assert last is not None
    assert (last.reason, last.problem) == ("uncovered", "")
    assert slices(last) == {"a": (0, 4), "b": (4, 7), "c": (7, 12)}


def test_nobody_moves_when_a_peer_joins_a_swarm_that_serves() -> None:
    serving = [state("a", 6, (0, 6), generation=2), state("b", 6, (6, 12), generation=3)]
    current = plan_of(a=(0, 6, 1), b=(6, 12, 2))
    news = planned([*serving, state("new", 4)], replace(current, replicas=1, stages=2, score=0.9))
    assert slices(news) == {"a": (0, 6), "b": (6, 12), "new": (0, 4)}
    assert news is not None
    assert news.plan is not None
    assert (news.reason, news.plan.force) == ("joined", False)
    assert (news.plan.replicas, news.plan.stages, news.plan.score) == (1, 2, 0.9)
    assert [entry.generation for entry in news.plan.slices] == [2, 3, 0]


def test_a_new_leader_of_a_swarm_at_rest_plans_nothing_new() -> None:
    serving = [state("a", 6, (0, 6), generation=2), state("b", 6, (6, 12), generation=3)]
    current = plan_of(7, epoch=4, leader="old", a=(0, 6, 1), b=(6, 12, 2))
    mine = planner(epoch=5, number=7)
    for now in range(10):
        assert mine.plan(float(now), serving, unmeasured, current) is None
    news = mine.plan(10.0, serving, unmeasured, current)
    assert news is not None
    assert (news.reason, slices(news)) == ("renewed", {"a": (0, 6), "b": (6, 12)})
    assert news.plan is not None
    assert news.plan.key == (5, full("me"), 8)
    assert mine.plan(30.0, serving, unmeasured, news.plan) is None


def test_a_new_leader_places_everybody_when_a_layer_is_lost_but_not_for_uneven_loads() -> None:
    current = plan_of(a=(0, 6, 1), b=(6, 12, 2), c=(0, 12))
    left = [state("a", 12, (0, 6), generation=2)]
    news = planned(left, current)
    assert slices(news) == {"a": (0, 12)}
    assert news is not None
    assert news.plan is not None
    assert (news.reason, news.plan.force) == ("uncovered", True)
    uneven = [state("a", 12, (0, 12)), state("b", 6, (0, 6)), state("c", 6, (0, 6))]
    assert planned(uneven, plan_of(a=(0, 12), b=(0, 6), c=(0, 6))) is None


def test_a_second_loss_soon_after_a_placement_is_mended() -> None:
    mine = planner()
    names = [state(name, 6) for name in "abcd"]
    mine.plan(0.0, names, unmeasured, None)
    first = mine.plan(0.3, names, unmeasured, None)
    assert first is not None
    assert first.plan is not None
    serving = following(first.plan, names)
    assert mine.plan(5.0, serving, unmeasured, first.plan) is None
    spans = slices(first)
    gone = [name for name in "abcd" if spans[name][0] == 6]
    left = [each for each in serving if each.peer.rstrip("0") not in gone]
    news = mine.plan(8.0, left, unmeasured, first.plan)
    assert news is not None
    assert news.reason == "mended"
    assert sorted(slices(news).values()) == [(0, 6), (6, 12)]
    assert (news.plan and news.plan.replicas, news.plan and news.plan.force) == (0, True)


def test_peers_that_leave_or_pause_are_planned_around() -> None:
    current = plan_of(a=(0, 12), b=(0, 12))
    for flag in ("leaving", "paused"):
        goes = state("a", 12, (0, 12), **{flag: True})
        assert planned([goes, state("b", 12, (0, 12))], current) is None
        assert slices(planned([goes, state("c", 12)], current)) == {"c": (0, 12)}


def test_pinned_peers_keep_their_slice_and_count() -> None:
    pinned = state("p", 12, (0, 8), pinned=True)
    news = planned([pinned, state("a", 4)])
    assert slices(news) == {"a": (8, 12)}
    assert news is not None
    assert "missing" in news.problem, "the others alone could not hold the model"
    assert planned([state("p", 12, (0, 12), pinned=True)]) is None
    lone = planned([pinned])
    assert lone is not None
    assert (lone.plan, lone.problem) == (
        None,
        "all peers have chosen their layers: start one without --layers",
    )


def test_an_operator_is_heard_once_and_only_so_often() -> None:
    mine = planner()
    serving = [state("a", 12, (0, 12), replans=4)]
    current = plan_of(a=(0, 12), leader="me")

    def asked(now: float, replans: int, *, force: bool = False) -> NewPlan | None:
        states = [state("a", 12, (0, 12), replans=replans, force=force)]
        return mine.plan(now, states, unmeasured, current)

    assert mine.plan(0.0, serving, unmeasured, current) is None
    news = asked(1.0, 5, force=True)
    assert news is not None
    assert news.plan is not None
    assert (news.reason, news.plan.force) == ("requested", True)
    assert asked(2.0, 5) is None
    assert asked(3.0, 6) is None
    news = asked(6.0, 6)
    assert news is not None
    assert news.plan is not None
    assert (news.reason, news.plan.force) == ("requested", False)
    assert asked(20.0, 0) is None, "one that restarted counts from the beginning"


def test_force_lasts_until_everybody_holds_what_it_was_given_for() -> None:
    current = plan_of(a=(6, 12), b=(0, 6), force=True)
    moving = [state("a", 6, (0, 6)), state("b", 6, (6, 12)), state("new", 6)]
    news = planned(moving, current)
    assert news is not None
    assert news.plan is not None
    assert news.plan.force
    there = [state("a", 6, (6, 12)), state("b", 6, (0, 6)), state("new", 6)]
    news = planned(there, current)
    assert news is not None
    assert news.plan is not None
    assert not news.plan.force


def test_a_peer_that_could_not_follow_is_told_again() -> None:
    mine = planner()
    current = plan_of(a=(0, 12, 3), b=(0, 6, 1), leader="me")
    a = state("a", 12, (0, 12), generation=4)
    assert mine.plan(0.0, [a, state("b", 6, generation=1)], unmeasured, current) is None, "it may yet"
    assert mine.plan(1.0, [a, state("b", 6, (0, 6, "loading"), generation=2)], unmeasured, current) is None
    news = mine.plan(2.0, [a, state("b", 6, generation=9)], unmeasured, current)
    assert news is not None
    assert (news.reason, slices(news)) == ("renewed", {"a": (0, 12), "b": (0, 6)})
    assert news.plan is not None
    assert [entry.generation for entry in news.plan.slices] == [4, 9]


def test_a_peer_that_came_back_smaller_gets_what_it_can_hold() -> None:
    news = planned([state("a", 12, (0, 12)), state("b", 4)], plan_of(a=(0, 12), b=(0, 6)))
    assert slices(news) == {"a": (0, 12), "b": (0, 4)}


def test_offers_that_cannot_be_are_left_out() -> None:
    hostile = [
        state("x", Capacity(2, 9, 9, 9)),
        state("y", 12, layer_s=0.0),
        replace(state("z", 12), metrics=None),
        state("w", 1, flops=1e300, kv_bytes=2**62),
        state("v", 1, flops=1e308, kv_bytes=2**62),
    ]
    roster = Roster.of(LAYERS, [*hostile, state("a", 12, (0, 12), (7, 40))])
    assert [member.offer.peer.rstrip("0") for member in roster.members] == ["w", "v", "a"]
    assert roster.members[2].ready == (Slice(full("a"), 0, 12),)
    assert set(slices(planned([*hostile, state("a", 12, (0, 12))]))) >= {"v", "w"}


def test_slices_line_up_to_the_pipelines_that_they_were_placed_in() -> None:
    pieces = [Slice(name, *span) for name, span in zip("abcdef", [(0, 6), (6, 12)] * 3, strict=True)]
    regions = dict.fromkeys("abcd", "eu") | {"e": "us", "f": "us"}
    assert assignment_of(12, pieces, regions) == Assignment(
        (
            Pipeline(("eu",), tuple(pieces[:2])),
            Pipeline(("eu",), tuple(pieces[2:4])),
            Pipeline(("us",), tuple(pieces[4:])),
        )
    )
    shuffled = [pieces[n] for n in (4, 0, 2, 1, 3, 5)]
    regional = assignment_of(12, shuffled, regions)
    assert all(len(pipeline.regions) == 1 for pipeline in regional.pipelines)
    ends = [Slice("a", 0, 5), Slice("b", 5, 9), Slice("c", 5, 12), Slice("d", 0, 3)]
    found = assignment_of(12, ends, dict.fromkeys("abcd", "eu"))
    assert found == Assignment((Pipeline(("eu",), (ends[0], ends[2])),), (ends[1], ends[3]))
    assert assignment_of(13, ends[:1], {"a": "eu"}) == Assignment((Pipeline(("eu",), (ends[0],)),))


class Slow:
    """A placement that takes its time."""

    def __init__(self) -> None:
        self.questions: list[Question] = []
        self.answers = 0

    def __call__(self, question: Question) -> Plan | None:
        self.questions.append(question)
        if not self.answers:
            return None
        self.answers -= 1
        return place_now(question)


def test_a_placement_that_takes_long_is_asked_for_until_it_is_done_and_nothing_else_is_decided() -> None:
    slow = Slow()
    mine = Planner(full("me"), LAYERS, 1, place=slow)
    peers = [state("a", 6), state("b", 6)]
    assert mine.plan(0.0, peers, unmeasured, None) is None
    for now in (0.3, 0.5, 0.7):
        assert mine.plan(now, peers, unmeasured, None) is None
        assert mine.waits
    assert mine.plan(0.9, [*peers, state("new", 6)], unmeasured, None) is None, "who joins waits"
    slow.answers = 1
    news = mine.plan(1.1, [*peers, state("new", 6)], unmeasured, None)
    assert len(slow.questions) == 5
    assert set(slow.questions) == {slow.questions[0]}
    assert news is not None
    assert (news.reason, slices(news)) == ("uncovered", slices(planned(peers)))
    assert mine.facts is slow.questions[0].facts
    news = mine.plan(2.0, [*peers, state("new", 6)], unmeasured, news.plan)
    assert news is not None
    assert news.reason == "joined"


def test_who_goes_while_a_placement_is_made_is_left_out_and_what_that_leaves_open_is_mended() -> None:
    slow = Slow()
    mine = Planner(full("me"), LAYERS, 1, place=slow)
    peers = [state("a", 6), state("b", 6), state("c", 6)]
    mine.plan(0.0, peers, unmeasured, None)
    mine.plan(0.3, peers, unmeasured, None)
    slow.answers = 1
    news = mine.plan(0.5, [peers[0], peers[2], state("b", 2)], unmeasured, None)
    assert "b" not in slices(news)
    assert slices(news)
    assert news is not None
    assert news.plan is not None
    assert news.plan.replicas == 0, "it is not what was placed any more"
    news = mine.plan(1.0, [peers[0], peers[2], state("b", 2)], unmeasured, news.plan)
    assert news is not None
    covered = {layer for span in slices(news).values() for layer in range(*span)}
    assert covered == set(range(LAYERS))


def test_a_request_is_answered_once_however_long_that_takes() -> None:
    slow = Slow()
    mine = Planner(full("me"), LAYERS, 1, place=slow)
    current = plan_of(a=(0, 12), leader="me")

    def seen(now: float, replans: int) -> NewPlan | None:
        states = [state("a", 12, (0, 12), replans=replans, force=True)]
        return mine.plan(now, states, unmeasured, current)

    assert seen(0.0, 1) is None
    assert seen(1.0, 2) is None
    assert seen(2.0, 2) is None
    slow.answers = 1
    news = seen(30.0, 2)
    assert news is not None
    assert news.plan is not None
    assert (news.reason, news.plan.force) == ("requested", True)
    assert seen(31.0, 2) is None


def test_when_a_slow_placement_finds_nothing_what_can_be_done_is_done() -> None:
    answers: list[str] = []

    def slow(question: Question) -> Plan | None:
        if answers:
            raise ModelError(answers[0])
        return None

    mine = Planner(full("me"), LAYERS, 1, place=slow)
    lacking = [state("a", 5)]
    assert mine.plan(0.0, lacking, unmeasured, None) is None
    assert mine.plan(0.3, lacking, unmeasured, None) is None
    answers.append("7 layers are missing")
    news = mine.plan(0.5, lacking, unmeasured, None)
    assert news is not None
    assert (news.reason, news.problem, slices(news)) == ("joined", "7 layers are missing", {"a": (0, 5)})
    assert not mine.waits
