"""Phase 1: known placements, objectives, crossings, stability and what cannot be placed."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from support.placement import check_plan

from p2pllm.errors import ModelError
from p2pllm.scheduling import Assignment, Capacity, Goal, Network, Offer, Pipeline, Slice, place
from p2pllm.scheduling.phase1.objective import throughput_bounds, token_s

GB = 2**30


def offers_of(capacities, *, region="eu", layer_s=1e-3):
    return [
        Offer(f"p{i}", region, c if isinstance(c, Capacity) else Capacity.same(c), layer_s)
        for i, c in enumerate(capacities)
    ]


def network_of(offers, **options):
    return Network({o.peer: o.region for o in offers}, same_region_s=0.001, cross_region_s=0.05, **options)


def placed(layers, offers, network=None, **options):
    network = network or network_of(offers)
    plan = place(layers, offers, network, **options)
    check_plan(layers, offers, plan)
    return plan


def counts(plan):
    return [[part.end - part.start for part in pipeline.slices] for pipeline in plan.pipelines]


# Model A: 3,211,591,680 B a layer, weights ratio 0.5; capacities and compute weights as published.
A80 = (Capacity(13, 13, 13, 12), 1 / 312)
A40 = (Capacity(6, 6, 6, 5), 1 / 312)
GPU32 = (Capacity(5, 4, 4, 4), 1 / 165)
GPU24 = (Capacity(4, 3, 3, 3), 1 / 82.6)


@pytest.mark.parametrize(
    ("layers", "gpus", "expected"),
    [
        (36, [A80] * 6, [[12, 12, 12], [12, 12, 12]]),
        (22, [A80, A80, A40, A40, GPU24, GPU24], [[3, 6, 13], [3, 6, 13]]),
        (6, [A80, GPU24, GPU24], [[3, 3], [6]]),
        (5, [A80], [[5]]),
    ],
)
def test_published_placements(layers, gpus, expected):
    offers = [Offer(f"p{i}", "eu", capacity, pace) for i, (capacity, pace) in enumerate(gpus)]
    plan = placed(layers, offers)
    assert sorted(sorted(pipeline) for pipeline in counts(plan)) == expected


def test_a_feasible_fleet_that_one_order_misses():
    """64 layers of 0.9752 GB on 32, 32, 20, 16, 80, 48 and 16 GB: enough only if the ends are well chosen."""

    def capacity(gigabytes):
        budget = 0.65 * gigabytes * GB
        middle, end, both = (int((budget - extra) // 975_200_000) for extra in (0, 1.56e9, 3.12e9))
        return Capacity(middle, end, end, both)

    offers = offers_of([capacity(gigabytes) for gigabytes in (32, 32, 20, 16, 80, 48, 16)])
    plan = placed(64, offers)
    # By hand: 22 + 22 + 14 + 11 + 57 + 34 + 11 layers, less the ends, hold two replicas of 64.
    assert plan.k == 2
    assert plan.stages == plan.stages_bound


def test_a_peer_without_room_for_ends_serves_in_the_middle():
    plan = placed(9, offers_of([Capacity(5, 3, 3, 1), Capacity(4, 0, 0, 0), Capacity(3, 2, 2, 1)]))
    (pipeline,) = plan.pipelines
    assert [part.peer for part in pipeline.slices][1] == "p1"


def test_the_least_head_is_taken_last():
    offers = [
        replace(offer, head_s=head) for offer, head in zip(offers_of([4, 4]), (5e-3, 1e-3), strict=True)
    ]
    (pipeline,) = placed(8, offers).pipelines
    assert pipeline.slices == (Slice("p0", 0, 4), Slice("p1", 4, 8))


def test_stages_follow_the_short_hops():
    """Four peers on a line: any ring but there-and-back in order of place is longer."""
    offers = offers_of([3, 3, 3, 3])
    place_of = {"p0": 0, "p2": 1, "p1": 2, "p3": 3}
    measured = {
        (a, b): 0.002 * abs(place_of[a] - place_of[b]) + 0.001 * (place_of[a] > place_of[b])
        for a, b in itertools.permutations(place_of, 2)
    }
    network = network_of(offers, measured=measured)
    (pipeline,) = placed(12, offers, network).pipelines
    peers = [part.peer for part in pipeline.slices]

    def ring(order):
        return sum(network(a, b) for a, b in itertools.pairwise([*order, order[0]]))

    assert ring(peers) == pytest.approx(min(ring(order) for order in itertools.permutations(place_of)))


def test_many_stages_are_ordered_too():
    """Ten peers on a circle, given in a shuffled order: the way round is 1 ms a hop, anything else more."""
    names = [f"p{i}" for i in range(10)]
    shuffled = random.Random(5).sample(names, 10)
    offers = [Offer(name, "eu", Capacity.same(2), 1e-3) for name in shuffled]
    measured = {
        (a, b): 0.001 * min(abs(i - j), 10 - abs(i - j))
        for (i, a), (j, b) in itertools.permutations(enumerate(names), 2)
    }
    network = network_of(offers, measured=measured)
    (pipeline,) = placed(20, offers, network).pipelines
    peers = [part.peer for part in pipeline.slices]
    assert sum(network(a, b) for a, b in itertools.pairwise([*peers, peers[0]])) < 0.014


def test_linear_by_hand():
    """Five of 3 layers, L = 6, r_RTT / T_comp = 0.2: Z(2) = 2 - 4/2 · 0.2, Z(1) = 1 - 2 · 0.2."""
    plan = placed(6, offers_of([3] * 5), goal=Goal(r_rtt_s=0.01, t_comp_s=0.05))
    assert [(c.k, c.stages, pytest.approx(c.z)) for c in plan.candidates] == [(1, 2, 0.6), (2, 4, 1.6)]
    assert (plan.k, plan.stages, plan.z) == (2, 4, pytest.approx(1.6))
    assert plan.z == plan.z_bound
    assert len(plan.spares) == 1


def test_dear_hops_make_fewer_replicas():
    """One holder alone and many small ones: with hops at 0.9 of T_comp more replicas do not pay."""
    offers = offers_of([8] + [2] * 4)
    cheap = placed(8, offers, goal=Goal(r_rtt_s=0.001, t_comp_s=1.0))
    dear = placed(8, offers, goal=Goal(r_rtt_s=0.9, t_comp_s=1.0))
    assert (cheap.k, cheap.stages) == (2, 5)
    assert (dear.k, dear.stages) == (1, 1)


def test_equal_z_takes_fewer_stages():
    """Without hops Z = k, and among k = 2 the whole holders are fewest."""
    offers = offers_of([4, 4, 2, 2, 2, 2])
    goal = Goal(r_rtt_s=0.0, t_comp_s=1.0)
    assert placed(4, offers[:2] + offers[2:4], goal=goal).stages == 4
    assert placed(4, offers, goal=goal).k == 4
    # 1 - 1·x = 2 - 3/2·x at x = 2: k = 1 and k = 2 tie.
    tied = placed(4, offers_of([4, 2, 2]), goal=Goal(r_rtt_s=2.0, t_comp_s=1.0))
    assert [c.z for c in tied.candidates] == [-1.0, -1.0]
    assert (tied.k, tied.stages) == (1, 1)


def test_ratio_by_hand():
    goal = Goal(objective="ratio", alpha=2.0, r_rtt_s=0.01, t_comp_s=0.05)
    plan = placed(6, offers_of([3] * 5), goal=goal)
    assert plan.z == pytest.approx(2**2 / (0.05 + 2 * 0.01))
    assert plan.scores.ratio == plan.z
    assert plan.scores.linear == pytest.approx(1.6)


@pytest.mark.parametrize("objective", ["ratio", "throughput"])
def test_more_replicas_are_worth_more_on_machines_of_any_speed(objective):
    for layer_s in (1e-12, 1e9):
        plan = placed(6, offers_of([3] * 5, layer_s=layer_s), goal=Goal(objective, r_rtt_s=0.0))
        assert plan.k == 2


def test_throughput_by_hand():
    """A fast pair beside a slow pair: 1/(6 · 1 ms + 2 · 1 ms) + 1/(6 · 4 ms + 2 · 1 ms) tokens/s."""
    fast, slow = offers_of([3, 3]), offers_of([3, 3], layer_s=4e-3)
    offers = [*fast, *(replace(offer, peer=f"s{i}") for i, offer in enumerate(slow))]
    plan = placed(6, offers, goal=Goal(objective="throughput"))
    assert plan.z == pytest.approx(1 / 0.008 + 1 / 0.026)
    # Without hops at best.
    assert plan.z_bound == pytest.approx(1 / 0.006 + 1 / 0.024)


def test_estimates_by_hand():
    """r_RTT over pairs of one region only, measured or typical; T_comp over all peers."""
    offers = [
        Offer("a", "eu", Capacity.same(8), 1e-3, 0.002),
        Offer("b", "eu", Capacity.same(8), 3e-3),
        Offer("c", "us", Capacity.same(8), 2e-3),
    ]
    network = network_of(offers, measured={("a", "b"): 0.004, ("a", "c"): 0.2})
    plan = placed(8, offers, network)
    assert plan.r_rtt_s == pytest.approx(0.004)
    assert plan.t_comp_s == pytest.approx((0.008 + 0.002 + 0.024 + 0.016) / 3)
    plan = placed(8, offers, replace(network, measured={("a", "b"): 0.004, ("b", "a"): 0.002}))
    assert plan.r_rtt_s == pytest.approx(0.003)
    plan = placed(8, offers, replace(network, measured={}))
    assert plan.r_rtt_s == pytest.approx(0.001)


def regional(**capacities):
    return [
        Offer(f"{region}{i}", region, Capacity.same(c), 1e-3)
        for region, some in capacities.items()
        for i, c in enumerate(some)
    ]


def test_pipelines_stay_in_their_region():
    """4 + 4 layers in each of two regions and 2 too few in a third: two replicas of 8, never three."""
    plan = placed(8, regional(ap=[4, 2], eu=[4, 4], us=[4, 4]))
    assert plan.k == 2
    assert {pipeline.regions for pipeline in plan.pipelines} == {("eu",), ("us",)}
    assert {part.peer for part in plan.spares} == {"ap0", "ap1"}
    assert plan.crossings == 0


def test_regions_share_replicas_out_where_stages_are_fewest():
    """With hops at 0.5 of T_comp the second replica comes from the region with the larger peers."""
    plan = placed(8, regional(eu=[2] * 8, us=[8, 4, 4]), goal=Goal(r_rtt_s=0.5, t_comp_s=1.0))
    # Z: 1 - 0.5; 2 - 3/2 · 0.5; 3 - 7/3 · 0.5; 4 - 11/4 · 0.5
    assert [c.stages for c in plan.candidates] == [1, 3, 7, 11]
    assert plan.k == 4


def test_crossing_as_seldom_as_can_be():
    """No region holds 12 layers; two do together, and eu-us is the nearest pair that does."""
    offers = regional(ap=[6], eu=[4, 3], sa=[2, 2], us=[5, 1])
    network = network_of(offers, regional={("eu", "us"): 0.03})
    plan = placed(12, offers, network)
    (pipeline,) = plan.pipelines
    assert pipeline.regions == ("eu", "us")
    assert (plan.k, plan.stages, plan.crossings) == (1, 3, 2)
    # Uniform hops: fewest stages decide, 6 + 4 + 3 with ap.
    assert placed(12, offers).pipelines[0].regions in {("ap", "eu"), ("ap", "us"), ("eu", "us")}


def test_three_regions_when_two_do_not_suffice():
    plan = placed(9, regional(ap=[3], eu=[3], us=[3]))
    assert plan.crossings == 3
    assert plan.pipelines[0].regions == ("ap", "eu", "us")


def test_long_pipelines_cross_as_seldom():
    """Only ap has room for embedding and only eu for the head, and the way from one to the other is short."""
    first, inner, last = Capacity(2, 2, 0, 0), Capacity(2, 0, 0, 0), Capacity(2, 0, 2, 0)
    offers = [
        Offer(f"{region}{i}", region, capacity, 1e-3)
        for region, capacity in (("ap", first), ("eu", last), ("us", inner))
        for i in range(3)
    ]
    plan = placed(18, offers, network_of(offers, regional={("ap", "eu"): 0.001}))
    assert (plan.stages, plan.crossings) == (9, 3)


def test_throughput_across_regions_is_bounded():
    offers = regional(eu=[4], us=[4])
    plan = placed(8, offers, goal=Goal(objective="throughput"))
    assert plan.z == pytest.approx(1 / 0.108)
    # Without hops at best.
    assert plan.z_bound == pytest.approx(1 / 0.008)


def test_nothing_moves_when_nothing_changed():
    rng = random.Random(1)
    offers = [
        Offer(
            f"p{i}", rng.choice(["eu", "us"]), Capacity.same(rng.choice([3, 4, 6])), rng.uniform(1, 2) / 1e3
        )
        for i in range(30)
    ]
    today = placed(10, offers)
    again = placed(10, rng.sample(offers, 30), today=today.assignment)
    assert set(again.assignment.slices) == set(today.assignment.slices)
    assert again.kept


def test_a_plain_join_keeps_the_pipelines():
    offers = offers_of([4, 4, 4, 4])
    today = placed(8, offers)
    newcomer = Offer("new", "eu", Capacity.same(5), 1e-3)
    plan = placed(8, [*offers, newcomer], today=today.assignment)
    assert plan.kept
    assert plan.pipelines == today.pipelines
    assert [part.peer for part in plan.spares] == ["new"]


def test_another_replica_is_worth_moving_for_and_moves_little():
    """Two pairs serve; a third pair comes. The two stay as they are, layer by layer."""
    offers = offers_of([4, 4, 4, 4])
    today = placed(8, offers)
    joined = [*offers, *(Offer(f"n{i}", "eu", Capacity.same(4), 1e-3) for i in range(2))]
    plan = placed(8, joined, today=today.assignment)
    assert not plan.kept
    assert plan.k == 3
    assert set(today.assignment.slices) <= set(plan.assignment.slices)


@pytest.mark.parametrize("seed", range(20))
def test_what_serves_stays_where_nothing_better_is_known(seed):
    """Peers of many kinds come to a working swarm. If as many replicas of as few stages can be had beside the
    pipelines of today, those stay layer by layer.
    """
    rng = random.Random(seed)
    offers = offers_of([rng.randint(2, 9) for _ in range(14)])
    today = placed(10, offers[:8])
    busy = {part.peer for pipeline in today.pipelines for part in pipeline.slices}
    plan, fresh = placed(10, offers, today=today.assignment), placed(10, offers)
    assert (plan.k, plan.stages) == (fresh.k, fresh.stages)
    others = [offer for offer in offers if offer.peer not in busy]
    beside = {c.k: c.stages for c in placed(10, others).candidates}
    if beside.get(plan.k - today.k) == plan.stages - today.stages:
        assert set(today.pipelines) <= set(plan.pipelines)


def test_a_lost_peer_is_replaced_in_place():
    """p0 of [p0 p1] is gone and a spare fits: the others keep what they hold."""
    offers = offers_of([4, 4, 4, 4, 4])
    today = placed(8, offers)
    lost = today.pipelines[0].slices[0].peer
    survivors = [offer for offer in offers if offer.peer != lost]
    plan = placed(8, survivors, today=today.assignment)
    assert plan.k == 2
    kept = {part for part in today.assignment.slices if part.peer != lost}
    assert len(kept & set(plan.assignment.slices)) >= 3


@pytest.mark.parametrize("lost", range(8))
def test_a_lost_peer_of_a_long_pipeline_is_replaced_in_place(lost):
    offers = offers_of([8] * 9)
    today = placed(64, offers)
    slices = today.pipelines[0].slices
    survivors = [offer for offer in offers if offer.peer != slices[lost].peer]
    plan = placed(64, survivors, today=today.assignment)
    assert len(set(slices) & set(plan.pipelines[0].slices)) == 7


def test_a_pipeline_of_today_that_crosses_is_the_only_one():
    """No region holds 4 layers, and a plan from elsewhere has two pipelines over three regions."""
    offers = regional(ap=[1, 1], eu=[2, 1], us=[2, 1])
    halves = [[("eu0", 0, 2), ("us0", 2, 4)], [("ap0", 0, 1), ("ap1", 1, 2), ("eu1", 2, 3), ("us1", 3, 4)]]
    today = Assignment(
        tuple(Pipeline(("ap", "eu", "us"), tuple(Slice(*part) for part in parts)) for parts in halves)
    )
    plan = place(4, offers, network_of(offers), today=today)
    assert plan.kept
    assert plan.pipelines == today.pipelines[:1]


def test_bounds_hold_for_a_shorter_pipeline_of_today_over_dearer_regions():
    offers = regional(eu=[5], us=[5], ap=[3, 2], sa=[3, 2])
    network = network_of(offers, regional={("ap", "sa"): 0.049})
    today = Assignment((Pipeline(("eu", "us"), (Slice("eu0", 0, 5), Slice("us0", 5, 10))),))
    fresh, plan = place(10, offers, network), place(10, offers, network, today=today)
    assert (fresh.stages, fresh.stages_bound) == (4, 4)
    assert (plan.kept, plan.stages) == (True, 2)
    assert plan.stages_bound <= plan.stages
    assert plan.z <= plan.z_bound


def test_an_assignment_has_one_slice_of_each_peer():
    """Or a pipeline of today that stays would use a peer twice."""
    twice = (Slice("p0", 0, 2), Slice("p0", 2, 4))
    for parts in ({"pipelines": (Pipeline(("eu",), twice),)}, {"spares": twice}):
        with pytest.raises(ValueError, match="p0 has more than one slice"):
            Assignment(**parts)


def test_a_broken_plan_of_today_is_no_reason_to_stay():
    offers = offers_of([4, 4])
    today = placed(8, offers)
    shrunk = [replace(offer, capacity=Capacity.same(3)) for offer in offers]
    with pytest.raises(ModelError, match="2 layers are missing"):
        place(8, shrunk, network_of(shrunk), today=today.assignment)


@pytest.mark.parametrize(
    ("layers", "capacities", "missing"),
    [
        (8, [4, 3], "1 layer is missing"),
        (8, [0, 0], "8 layers are missing"),
        # Room for 9, but nobody has it for the first layer with the embedding beside it.
        (8, [Capacity(5, 0, 4, 0), Capacity(4, 0, 3, 0)], "1 layer is missing"),
        # One peer cannot be both ends.
        (8, [Capacity(5, 5, 5, 0), Capacity(4, 0, 0, 0)], "1 layer is missing"),
        (1, [Capacity(3, 3, 3, 0), Capacity(3, 3, 3, 0)], "1 layer is missing"),
    ],
)
def test_what_cannot_be_placed_says_how_much_is_missing(layers, capacities, missing):
    offers = offers_of(capacities)
    with pytest.raises(ModelError, match=missing):
        place(layers, offers, network_of(offers))


def test_nonsense_is_refused():
    offers = offers_of([4])
    for layers, some in ((0, offers), (4, []), (4, [*offers, *offers])):
        with pytest.raises(ValueError, match="placement needs"):
            place(layers, some, network_of(some))
    for bad in (
        {"capacity": Capacity(4, 5, 4, 4)},
        {"capacity": Capacity(4, 4, 4, -1)},
        {"layer_s": 0.0},
        {"layer_s": float("nan")},
        {"head_s": -1.0},
        {"flops": float("inf")},
    ):
        with pytest.raises(ValueError, match="peer p0"):
            replace(offers[0], **bad)


def test_large_swarms_list_what_was_solved_and_prove_it():
    rng = random.Random(8)
    offers = [
        Offer(f"p{i}", f"r{i % 4}", Capacity.same(rng.choice([57, 34, 28, 25, 22, 20, 17, 14])), 1e-3)
        for i in range(100)
    ]
    plan = placed(64, offers)
    assert plan.stages == plan.stages_bound
    assert plan.z == plan.z_bound
    assert plan.k in [candidate.k for candidate in plan.candidates]
    # Eq 1
    assert plan.k <= sum(offer.capacity.middle for offer in offers) // 64


@pytest.mark.parametrize("seed", range(25))
def test_no_placement_exceeds_the_throughput_bound(seed):
    """Over all ways to make pipelines of up to five peers."""
    rng = random.Random(seed)
    layers = rng.randint(2, 8)
    offers = [
        Offer(
            f"p{i}", "eu", Capacity.same(rng.randint(1, layers)), rng.uniform(1, 9) / 1e3, rng.random() / 1e3
        )
        for i in range(rng.randint(2, 5))
    ]
    network = Network({o.peer: "eu" for o in offers}, same_region_s=0.0)
    most = min(3, sum(offer.capacity.middle for offer in offers) // layers)
    bounds = throughput_bounds(layers, offers, most)

    def best(free, replicas):
        if not replicas:
            return 0.0
        return max(
            (
                1
                / min(
                    token_s(p, {o.peer: o for o in members}, network)
                    for p in orders(layers, members, network)
                )
                + best([o for o in free if o not in members], replicas - 1)
                for size in range(1, len(free) + 1)
                for members in itertools.combinations(free, size)
                if size <= layers <= sum(o.capacity.middle for o in members)
            ),
            default=float("-inf"),
        )

    for replicas in range(1, most + 1):
        assert best(offers, replicas) <= bounds[replicas] + 1e-9


def orders(layers, members, network):
    """Pipelines of all orders of the members and all ways to deal out the layers."""
    for order in itertools.permutations(members):
        for cuts in itertools.combinations(range(1, layers), len(order) - 1):
            bounds = [0, *cuts, layers]
            slices = tuple(
                Slice(o.peer, start, end) for o, start, end in zip(order, bounds, bounds[1:], strict=False)
            )
            if all(part.end - part.start <= o.capacity.middle for part, o in zip(slices, order, strict=True)):
                yield Pipeline(("eu",), slices)
