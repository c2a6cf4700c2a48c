"""One peer's part in leading: claims, plans of its own and of others, and which plan counts."""

from __future__ import annotations

from collections.abc import Sequence

from support.states import full, plan_of, state

from p2pllm.records import MAX_EPOCH, ClaimBody
from p2pllm.scheduling import Network
from p2pllm.swarm.latency import UNMEASURED
from p2pllm.swarm.placement.leadership import Leadership, Outgoing
from p2pllm.swarm.placement.swarm_plan import Assembler, SwarmPlan, to_bodies
from p2pllm.swarm.view import PeerState

LAYERS = 12
SERVING = [state("a", 6, (0, 6), generation=1), state("b", 6, (6, 12), generation=1)]


def unmeasured() -> Network:
    return UNMEASURED


def tick(mine: Leadership, now: float, states: Sequence[PeerState]) -> Outgoing:
    return mine.tick(now, states, unmeasured, joined=True)


def follower(leader: str = "b", epoch: int = 3) -> Leadership:
    """Peer a, which has seen somebody lead."""
    mine = Leadership(full("a"), LAYERS)
    mine.hear(full(leader), ClaimBody(epoch, 2), 1, 0.0)
    tick(mine, 0.0, SERVING)
    return mine


def put_together(outgoing: Outgoing, signer: str) -> SwarmPlan | None:
    assembler = Assembler()
    for body in outgoing.plans:
        assembler.hear(full(signer), body)
    return assembler.latest(full(signer))


def test_a_lone_peer_claims_at_once_and_plans_within_a_second() -> None:
    mine = Leadership(full("a"), LAYERS, epoch=4)
    alone = [state("a", LAYERS)]
    assert tick(mine, 0.0, alone).claim == ClaimBody(5, 0)
    assert (mine.leader, mine.leads(0.0), mine.epoch) == (full("a"), True, 5)
    outgoing = [tick(mine, now / 10, alone) for now in range(1, 10)]
    (planned,) = [each for each in outgoing if each.plans]
    assert planned.news is not None
    assert planned.news.reason == "uncovered"
    assert mine.plan == planned.news.plan == put_together(planned, "a")
    assert mine.plan is not None
    assert mine.plan.key == (5, full("a"), 1)


def test_a_leader_that_is_not_in_the_view_yet_has_its_epoch_all_the_same() -> None:
    mine = Leadership(full("a"), LAYERS)
    assert mine.led_epoch == 0
    mine.hear(full("b"), ClaimBody(7, 2), 1, 0.0)
    tick(mine, 0.0, SERVING[:1])
    assert (mine.leader, mine.led_epoch) == (full("b"), 7)
    alone = Leadership(full("a"), LAYERS, epoch=4)
    tick(alone, 0.0, SERVING[:1])
    assert (alone.leader, alone.led_epoch) == (full("a"), 5)


def test_a_plan_is_published_again_while_its_leader_leads() -> None:
    mine = Leadership(full("a"), LAYERS)
    due = [now for now in range(26) if tick(mine, float(now), [state("a", LAYERS)]).plans]
    assert due == [1, 11, 21]


def test_others_plans_count_if_their_signer_leads() -> None:
    mine = follower()
    plan = plan_of(1, leader="b", epoch=3, a=(0, 6))
    for signer in ("z", "b"):
        for body in to_bodies(plan):
            mine.hear(full(signer), body, 1, 0.5)
        tick(mine, 0.5, SERVING)
        assert mine.plan == (plan if signer == "b" else None)
    assert (mine.leader, mine.bits, mine.leads(0.5)) == (full("b"), 2, False)


def test_a_leader_cannot_plan_for_epochs_to_come() -> None:
    mine = follower()
    for body in to_bodies(plan_of(1, leader="b", epoch=4, a=(0, 6))):
        mine.hear(full("b"), body, 1, 0.5)
    tick(mine, 0.5, SERVING)
    assert mine.plan is None
    mine.hear(full("b"), ClaimBody(4, 0), 2, 1.0)
    tick(mine, 1.0, SERVING)
    assert mine.plan is not None


def test_a_plan_never_gives_way_to_a_lower_one() -> None:
    mine = follower(epoch=3)
    high = plan_of(2, leader="b", epoch=3, a=(0, 6))
    for body in to_bodies(high):
        mine.hear(full("b"), body, 1, 0.1)
    tick(mine, 0.1, SERVING)
    mine.hear(full("c"), ClaimBody(3, 0), 1, 0.2)  # of the same epoch, and higher by its id
    members = [*SERVING, state("c", 6)]
    for body in to_bodies(plan_of(9, leader="c", epoch=2, a=(2, 6))):
        mine.hear(full("c"), body, 1, 0.2)
    tick(mine, 0.3, members)
    assert (mine.leader, mine.plan) == (full("c"), high)
    for body in to_bodies(plan_of(10, leader="c", epoch=3, a=(2, 6))):
        mine.hear(full("c"), body, 2, 0.4)
    tick(mine, 0.5, members)
    assert mine.plan == plan_of(10, leader="c", epoch=3, a=(2, 6))


def test_in_the_last_epoch_the_plan_of_whoever_leads_counts() -> None:
    mine = follower("z", MAX_EPOCH)
    with_z = [*SERVING, state("z", 6)]
    tick(mine, 0.1, with_z)
    for body in to_bodies(plan_of(2**60, leader="z", epoch=MAX_EPOCH, a=(0, 6))):
        mine.hear(full("z"), body, 1, 0.1)
    tick(mine, 0.2, with_z)
    assert mine.plan is not None
    for now in (3.0, 3.5, 3.6):
        mine.hear(full("b"), ClaimBody(MAX_EPOCH, 0), round(now * 10), now)
        tick(mine, now, SERVING)
    sane = plan_of(1, leader="b", epoch=MAX_EPOCH, a=(0, 6))
    for body in to_bodies(sane):
        mine.hear(full("b"), body, 1, 3.7)
    tick(mine, 3.8, SERVING)
    assert mine.plan == sane


def test_a_new_leader_goes_on_from_the_plan_it_knows_and_numbers_go_on() -> None:
    mine = follower()
    plan = plan_of(7, leader="b", epoch=3, a=(0, 6), b=(6, 12))
    for body in to_bodies(plan):
        mine.hear(full("b"), body, 1, 0.1)
    mine.hear(full("a"), to_bodies(plan_of(40, epoch=1))[0], 1, 0.1)  # of an earlier life
    tick(mine, 0.1, SERVING)
    without_b = [SERVING[0], state("c", 6, (6, 12))]
    now = 0.1
    while not mine.leads(now):
        now = round(now + 0.1, 1)
        outgoing = tick(mine, now, without_b)
        if outgoing.claim is not None:
            mine.published(now)
    assert 3.0 <= now <= 4.0
    while not (outgoing := tick(mine, now, without_b)).plans:
        assert mine.plan == plan, "nothing new without a reason"
        if outgoing.claim is not None:
            mine.published(now)
        now = round(now + 0.1, 1)
    assert mine.leaderless_s(now) == 0.0
    assert outgoing.news is not None
    assert outgoing.news.reason == "renewed"
    assert mine.plan is not None
    assert mine.plan.key == (4, full("a"), 41)


def test_who_is_not_renewed_or_sees_a_higher_claim_issues_nothing() -> None:
    mine = Leadership(full("a"), LAYERS)
    two = [state("a", LAYERS), state("b", LAYERS)]
    for tenth in range(20):
        outgoing = tick(mine, tenth / 10, two)
        assert (outgoing.plans, outgoing.news) == ((), None)
    mine.published(2.0)
    assert any(tick(mine, 2.0 + tenth / 10, two).plans for tenth in range(10))
    mine.hear(full("b"), ClaimBody(1, 0), 1, 3.0)
    more = [*two, state("c", LAYERS)]
    assert [tick(mine, 3.0 + tenth, more) for tenth in range(2)] == [Outgoing(), Outgoing()]
    assert mine.leader == full("b")


def test_the_directory_is_cut_as_the_leader_says() -> None:
    mine = Leadership(full("0"), LAYERS)
    many = [state(f"{number:03x}", 1) for number in range(1, 64)] + [state("0", 1)]
    tick(mine, 0.0, many)
    mine.published(0.0)
    outgoing = tick(mine, 1.0, many)
    assert outgoing.claim is not None
    assert outgoing.claim.bits == mine.bits > 0
