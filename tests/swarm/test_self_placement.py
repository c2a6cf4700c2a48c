"""Election, plans and slices of a whole swarm together, in simulated time: it places itself, and heals."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from support.bodies import metrics_body, peer_body
from support.states import full, state

from p2pllm.records import ClaimBody, PlanBody
from p2pllm.scheduling import Capacity, place
from p2pllm.swarm.latency import UNMEASURED
from p2pllm.swarm.placement.allocation import Allocation, Drop, Load
from p2pllm.swarm.placement.leadership import Leadership
from p2pllm.swarm.placement.members import offer_of
from p2pllm.swarm.view import PeerState

LAYERS = 12
TICK_S = 0.1
LATE_S = 0.4
LOAD_S = 1.0
GONE_S = 5.5
JOIN_S = 1.5
"""By then one that joins has heard a leader, if there is one."""


class Peer:
    def __init__(self, name: str, room: int, born: float) -> None:
        self.name = full(name)
        self.born = born
        self.body = peer_body(capacity=tuple(Capacity.same(room)))
        self.leadership = Leadership(self.name, LAYERS)
        self.allocation = Allocation(self.name, LAYERS, Capacity.same(room))
        self.work: list[tuple[float, Load | Drop]] = []
        self.loaded: list[tuple[int, int]] = []

    def state(self, now: float) -> PeerState:
        metrics = metrics_body(spans=self.allocation.spans(), generation=self.allocation.generation)
        return PeerState(self.name, self.body, metrics, now)

    @property
    def ready(self) -> set[int]:
        spans = [span for span in self.allocation.spans() if span.state == "ready"]
        return {layer for span in spans for layer in range(span.start, span.end)}


class Swarm:
    """Peers that hear each other's records late, and of the dead until they must be so."""

    def __init__(self, **rooms: int) -> None:
        self.now, self.seq = 0.0, 0
        self.peers: dict[str, Peer] = {}
        self.seen: dict[str, deque[PeerState]] = {}
        self.mail: deque[tuple[float, str, ClaimBody | PlanBody, int]] = deque()
        self.add(**rooms)

    def add(self, **rooms: int) -> None:
        self.peers |= {full(name): Peer(name, room, self.now) for name, room in rooms.items()}

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            for name, peer in self.peers.items():
                self.seen.setdefault(name, deque(maxlen=60)).append(peer.state(self.now))
            while self.mail and self.mail[0][0] <= self.now:
                _, sender, body, seq = self.mail.popleft()
                for peer in self.peers.values():
                    peer.leadership.hear(sender, body, seq, self.now)
            for peer in self.peers.values():
                self.step(peer)

    def view(self, own: str) -> list[PeerState]:
        states = []
        for name, said in self.seen.items():
            late = LATE_S if name != own else 0.0
            known = [each for each in said if each.heard_s <= self.now - late]
            if known and self.now - known[-1].heard_s <= GONE_S:
                states.append(replace(known[-1], heard_s=known[-1].heard_s + late))
        return states

    def step(self, peer: Peer) -> None:
        for due in [item for item in peer.work if item[0] <= self.now]:
            peer.work.remove(due)
            (peer.allocation.loaded if isinstance(due[1], Load) else peer.allocation.dropped)(due[1].slice)
        states = self.view(peer.name)
        joined = self.now >= peer.born + JOIN_S
        outgoing = peer.leadership.tick(self.now, states, lambda: UNMEASURED, joined=joined)
        for body in (outgoing.claim, *outgoing.plans):
            if body is not None:
                self.seq += 1
                self.mail.append((self.now + LATE_S, peer.name, body, self.seq))
        if outgoing.claim is not None and len(self.peers) > 1:
            peer.leadership.published(self.now)
        if peer.leadership.plan is not None:
            peer.allocation.follow(peer.leadership.plan)
        away = peer.leadership.leaderless_s(self.now)
        for action in peer.allocation.step(self.now, states, lambda _start, _end: 0, away):
            if isinstance(action, Load):
                peer.loaded.append((action.slice.start, action.slice.end))
            peer.work.append((self.now + LOAD_S, action))

    @property
    def served(self) -> bool:
        return set().union(*(peer.ready for peer in self.peers.values())) == set(range(LAYERS))

    def until_served(self, limit: float) -> float:
        began = self.now
        while not self.served:
            assert self.now - began < limit
            self.run(TICK_S)
        return self.now - began

    def holdings(self) -> dict[str, set[int]]:
        return {name.rstrip("0"): peer.ready for name, peer in self.peers.items()}

    @property
    def leader(self) -> str:
        (leader,) = {peer.leadership.leader for peer in self.peers.values()}
        assert leader is not None
        return leader


def test_peers_that_start_together_come_to_the_plan_of_the_plan_command() -> None:
    rooms = {"a": 5, "b": 4, "c": 9, "d": 7, "e": 6, "f": 3}
    swarm = Swarm(**rooms)
    swarm.until_served(5.0)
    swarm.run(5.0)
    offers = [offer_of(state(name, room)) for name, room in rooms.items()]
    expected = place(LAYERS, [offer for offer in offers if offer is not None], UNMEASURED)
    assert swarm.holdings() == {
        piece.peer.rstrip("0"): set(range(piece.start, piece.end)) for piece in expected.assignment.slices
    }
    assert all(len(peer.loaded) == 1 for peer in swarm.peers.values())


def test_a_join_touches_nobody_else_and_a_loss_is_healed() -> None:
    swarm = Swarm(a=6, b=6)
    swarm.until_served(5.0)
    before, leader = swarm.holdings(), swarm.leader
    swarm.add(c=6)
    swarm.run(6.0)
    assert (swarm.holdings() | before, swarm.leader) == (swarm.holdings(), leader)
    assert len(swarm.holdings()["c"]) == 6
    swarm.add(d=6)
    swarm.run(6.0)
    assert len(swarm.holdings()["d"]) == 6
    # Whoever held it alone is gone; a spare, or another who is not needed where it is, takes its layers.
    both = [name for name, peer in swarm.peers.items() if 0 in peer.ready]
    for name in both:
        del swarm.peers[name]
    swarm.until_served(GONE_S + 2 * LATE_S + 4.0)
    assert all(len(peer.loaded) <= 2 for peer in swarm.peers.values())


def test_the_leader_dies_and_another_goes_on_from_its_plan() -> None:
    swarm = Swarm(a=12, b=6, c=6, d=12)
    swarm.until_served(5.0)
    swarm.run(3.0)
    leader = swarm.leader
    del swarm.peers[leader]
    before = {name: list(peer.loaded) for name, peer in swarm.peers.items()}
    swarm.run(4.0)
    assert swarm.leader != leader
    swarm.run(16.0)
    assert swarm.served
    assert {name: peer.loaded for name, peer in swarm.peers.items()} == before, "nobody had to move"
    plans = {peer.leadership.plan for peer in swarm.peers.values()}
    assert {plan and plan.leader for plan in plans} == {swarm.leader}


def test_one_that_pauses_is_replaced_and_taken_back() -> None:
    swarm = Swarm(a=12, b=12)
    swarm.until_served(5.0)
    swarm.run(3.0)
    paused = swarm.peers[full("a")]
    paused.body = replace(paused.body, paused=True)
    paused.allocation.pause()
    swarm.run(5.0)
    assert paused.allocation.spans() == ()
    assert swarm.served
    paused.body = replace(paused.body, paused=False)
    paused.allocation.resume()
    swarm.run(8.0)
    assert paused.ready == set(range(LAYERS))


def test_one_that_restarts_under_its_identity_is_told_again() -> None:
    swarm = Swarm(a=6, b=6, c=12)
    swarm.until_served(5.0)
    swarm.run(3.0)
    victim = next(name for name in swarm.peers if name != swarm.leader)
    room = swarm.peers[victim].body.capacity[0]
    was = swarm.peers[victim].ready
    del swarm.peers[victim]
    swarm.run(1.0)
    swarm.peers[victim] = Peer(victim.rstrip("0"), room, swarm.now)
    swarm.run(8.0)
    assert swarm.peers[victim].ready == was
