"""Many peers that follow plans, each by a view that is late: nothing that somebody holds is ever lost."""

from __future__ import annotations

import random
from collections import deque
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.bodies import metrics_body, peer_body
from support.states import full

from p2pllm.records import PlanEntry, Span
from p2pllm.scheduling import Capacity, Slice
from p2pllm.swarm.placement.allocation import Allocation, Drop, Load
from p2pllm.swarm.placement.swarm_plan import SwarmPlan
from p2pllm.swarm.view import PeerState

STEP_S = 0.5
LATE_S = 1.5
"""What records take at most."""


class Peer:
    """An allocation, the memory that it rules, and what others have heard of it."""

    def __init__(self, name: str, layers: int, capacity: Capacity, pinned: tuple[int, int] | None) -> None:
        self.name = full(name)
        self.layers = layers
        self.capacity = capacity
        self.pinned = pinned
        self.allocation = Allocation(self.name, layers, capacity, pinned=pinned, grace_s=5.0)
        self.aim = self.allocation.target, self.allocation.generation
        self.memory: set[int] = set()
        self.work: list[tuple[float, Load | Drop]] = []
        self.sessions = 0
        self.fails = False
        self.said: deque[tuple[float, tuple[Span, ...], int, bool]] = deque(maxlen=64)

    def count(self, start: int, end: int) -> int:
        return self.sessions

    def say(self, now: float) -> None:
        self.said.append((now, self.allocation.spans(), self.allocation.generation, self.allocation.paused))

    def heard(self, now: float, late: float) -> PeerState | None:
        """How one sees it whose news are that late."""
        known = [item for item in self.said if item[0] <= now - late]
        if not known:
            return None
        at, spans, generation, paused = known[-1]
        body = peer_body(capacity=tuple(self.capacity), paused=paused, pinned=self.pinned is not None)
        metrics = metrics_body(spans=spans, generation=generation)
        return PeerState(self.name, body, metrics, at + late)

    def act(self, now: float) -> None:
        """Finish what is due."""
        for due in [item for item in self.work if item[0] <= now]:
            self.work.remove(due)
            action = due[1]
            layers = set(range(action.slice.start, action.slice.end))
            if isinstance(action, Drop):
                assert layers <= self.memory
                self.memory -= layers
                self.allocation.dropped(action.slice)
            elif self.fails:
                self.allocation.failed(action.slice, now)
            else:
                self.memory |= layers
                self.allocation.loaded(action.slice)

    def begin(self, now: float, actions: tuple[Load | Drop, ...], rng: random.Random) -> None:
        for action in actions:
            layers = set(range(action.slice.start, action.slice.end))
            if isinstance(action, Load):
                assert not layers & self.memory, "loaded again what it holds"
            self.work.append((now + rng.choice([0.0, 0.6, 4.0]), action))
        used = self.memory | {
            layer
            for _, action in self.work
            if isinstance(action, Load)
            for layer in range(action.slice.start, action.slice.end)
        }
        room = self.capacity.at(is_first=0 in used, is_last=self.layers - 1 in used)
        assert len(used) <= room or self.pinned, "holds more than fits"


class World:
    """All peers, the plan that counts, and the layers that somebody holds and nobody may lose."""

    def __init__(self, layers: int, rooms: list[Capacity], pinned: bool, seed: int) -> None:
        self.layers, self.rng, self.now = layers, random.Random(seed), 100.0
        self.numbers = count(1)
        self.peers = {
            name: Peer(name, layers, room, (0, min(room.middle, layers)) if pinned and name == "a" else None)
            for name, room in zip("abcdef", rooms, strict=False)
        }
        self.late = {(one, two): self.rng.uniform(0, LATE_S) for one in self.peers for two in self.peers}
        self.covered: set[int] = set()
        self.excused: dict[int, float] = {}
        self.plan: SwarmPlan | None = None

    def windows(self, peer: Peer) -> list[tuple[int, int]]:
        return [
            (start, end)
            for start in range(self.layers)
            for end in range(start + 1, self.layers + 1)
            if peer.capacity.holds(start, end, self.layers)
        ]

    def issue(self, slices: dict[str, tuple[int, int]], *, force: bool = False, stale: bool = False) -> None:
        entries = tuple(
            PlanEntry(
                self.peers[name].name[:16],
                *span,
                max(0, self.peers[name].allocation.generation - (stale and self.rng.random() < 0.3)),
            )
            for name, span in slices.items()
        )
        self.plan = SwarmPlan(full("z"), 1, next(self.numbers), 0, 0, 0.0, force, entries)

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += STEP_S
            for name in self.rng.sample(sorted(self.peers), len(self.peers)):
                peer = self.peers[name]
                before = peer.allocation.spans()
                peer.act(self.now)
                if self.plan is not None and self.rng.random() < 0.5:
                    peer.allocation.follow(self.plan)
                states = [
                    heard
                    for other in self.peers
                    if (heard := self.peers[other].heard(self.now, self.late[other, name])) is not None
                ]
                actions = peer.allocation.step(self.now, states, peer.count)
                peer.begin(self.now, actions, self.rng)
                spans = peer.allocation.spans()
                if spans != before or not peer.said or self.now - peer.said[-1][0] >= 1.5:
                    peer.say(self.now)
                self.check(peer, spans)

    def check(self, peer: Peer, spans: tuple[Span, ...]) -> None:
        assert len(spans) <= 3
        told = {layer for span in spans if span.state != "loading" for layer in range(span.start, span.end)}
        assert told == peer.memory
        aim = peer.allocation.target, peer.allocation.generation
        assert aim[1] > peer.aim[1] or aim == peer.aim, "another slice in the same generation"
        peer.aim = aim
        held = set().union(*(other.memory for other in self.peers.values()))
        forced = self.plan is not None and self.plan.force
        assert forced or self.covered <= held, "the last holder has dropped a layer"
        self.covered = held - {layer for layer, until in self.excused.items() if self.now < until}


class Swarm(RuleBasedStateMachine):
    """Plans come at random; peers follow them."""

    @initialize(
        layers=st.integers(2, 10),
        rooms=st.lists(st.integers(1, 10), min_size=2, max_size=6),
        pinned=st.booleans(),
        seed=st.integers(0, 2**32),
    )
    def start(self, layers: int, rooms: list[int], pinned: bool, seed: int) -> None:
        unlike = [Capacity(room, max(room - 1, 0), max(room - 1, 0), max(room - 2, 0)) for room in rooms]
        self.world = World(layers, unlike, pinned, seed)

    @rule(data=st.data(), stale=st.booleans())
    def plan_changes(self, data: st.DataObject, stale: bool) -> None:
        slices = {}
        for name, peer in self.world.peers.items():
            if peer.pinned is None and self.world.windows(peer) and data.draw(st.integers(0, 4)):
                slices[name] = data.draw(st.sampled_from(self.world.windows(peer)))
        self.world.issue(slices, stale=stale)

    @rule(seconds=st.sampled_from([0.5, 2.0, 4.0, 12.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(data=st.data())
    def something_happens(self, data: st.DataObject) -> None:
        peer = self.world.peers[data.draw(st.sampled_from(sorted(self.world.peers)))]
        match data.draw(st.sampled_from(["fails", "sessions", "pause"])):
            case "fails":
                peer.fails = not peer.fails
            case "sessions":
                peer.sessions = 0 if peer.sessions else 3
            case "pause":
                # Others may have been about to drop because of what it held.
                self.world.excused |= dict.fromkeys(peer.memory, self.world.now + 60.0)
                self.world.covered -= self.world.excused.keys()
                if peer.allocation.paused:
                    peer.allocation.resume()
                else:
                    peer.allocation.pause()

    @precondition(lambda self: self.world.plan is None or not self.world.plan.force)
    @rule(data=st.data())
    def it_comes_to_rest(self, data: st.DataObject) -> None:
        """By force any plan is reached, whatever has been."""
        for peer in self.world.peers.values():
            peer.fails, peer.sessions = False, 0
            if peer.allocation.paused:
                peer.allocation.resume()
            peer.allocation._retry_s = 0.0  # else it could be a minute
        slices = {
            name: data.draw(st.sampled_from(self.world.windows(peer)))
            for name, peer in self.world.peers.items()
            if peer.pinned is None and self.world.windows(peer)
        }
        planned = {layer for span in slices.values() for layer in range(*span)}
        planned |= {
            layer for peer in self.world.peers.values() if peer.pinned for layer in range(*peer.pinned)
        }
        self.world.issue(slices, force=True)
        self.world.pass_time(30.0)
        for name, span in slices.items():
            layers = set(range(*span))
            spare = self.world.peers[name].memory - layers
            assert layers <= self.world.peers[name].memory
            assert not spare or spare - planned, "kept layers that all have other holders"
        self.world.issue({}, force=False)


Swarm.TestCase.settings = settings(max_examples=15, stateful_step_count=10, deadline=None, derandomize=True)
TestSwarm = Swarm.TestCase


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.integers(0, 2**32), st.integers(2, 4), st.integers(1, 3))
def test_peers_that_all_hold_the_same_never_all_drop_it(seed: int, count: int, layers: int) -> None:
    world = World(layers, [Capacity.same(layers)] * count, False, seed)
    for name, peer in world.peers.items():
        peer.memory = set(range(layers))
        peer.allocation.loaded(Slice(full(name), 0, layers))
        peer.say(world.now)
    world.pass_time(2.0)
    for _ in range(25):
        slices = {name: world.rng.choice(world.windows(peer)) for name, peer in world.peers.items()}
        world.issue({name: span for name, span in slices.items() if world.rng.random() < 0.8})
        world.pass_time(world.rng.choice([0.5, 1.0, 1.5, 2.5, 4.0]))


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 17), st.integers(1, 9), st.sampled_from([0.5, 3.0, 7.0])), max_size=8)
)
def test_a_record_has_room_for_what_plans_that_follow_each_other_leave(
    plans: list[tuple[int, int, float]],
) -> None:
    layers = 18
    other = Peer("o", layers, Capacity.same(layers), None)
    other.allocation.loaded(Slice(other.name, 0, layers))
    mine = Peer("me", layers, Capacity.same(layers), None)
    mine.sessions = 1  # so that what drains goes on doing so
    now, rng = 0.0, random.Random(len(plans))
    for number, (start, length, seconds) in enumerate(plans):
        entry = PlanEntry(full("me")[:16], start, min(start + length, layers), mine.allocation.generation)
        mine.allocation.follow(SwarmPlan(full("z"), 1, number, 0, 0, 0.0, False, (entry,)))
        until = now + seconds
        while now < until:
            now += STEP_S
            other.say(now)
            heard = other.heard(now, 0.0)
            assert heard is not None
            mine.act(now)
            mine.begin(now, mine.allocation.step(now, [heard], mine.count), rng)
            assert len(mine.allocation.spans()) <= 3
