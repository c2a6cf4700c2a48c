"""Whose request is next, held against the theorem about start-time fair queueing and against counting."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from p2pllm.serving.front.fair_queue import MAX_CLIENTS, MOST_OF_ONE, MOST_WAITING, FairQueue, Ticket
from p2pllm.serving.front.keys import Client


def served(queue: FairQueue, count: int) -> list[str]:
    """Names of the next so many, served one after the other at the cost that was guessed."""
    names = []
    for _ in range(count):
        ticket = queue.first()
        assert ticket is not None
        queue.start(ticket)
        queue.end(ticket, ticket.cost)
        names.append(ticket.client.name)
    return names


def test_equal_requests_are_served_by_weight() -> None:
    queue = FairQueue()
    for number in range(70):
        for weight in (1, 2, 4):
            queue.add(Ticket(Client(str(weight), weight=weight), 100.0, float(number)))
    assert Counter(served(queue, 70)) == {"1": 10, "2": 20, "4": 40}


@settings(derandomize=True, deadline=None)
@given(
    costs=st.tuples(*[st.lists(st.floats(1, 500), min_size=30, max_size=60)] * 2),
    weights=st.tuples(*[st.floats(0.1, 10)] * 2),
)
def test_no_client_gets_further_ahead_than_the_theorem_says(
    costs: tuple[list[float], list[float]], weights: tuple[float, float]
) -> None:
    """Theorem 1 of Goyal, Vin and Cheng: while two flows wait, |W_f/r_f − W_m/r_m| ≤ l_f/r_f + l_m/r_m."""
    queue = FairQueue()
    clients = [Client(name, weight=weight) for name, weight in zip("fm", weights, strict=True)]
    for client, its in zip(clients, costs, strict=True):
        for number, cost in enumerate(its):
            queue.add(Ticket(client, cost, float(number)))
    bound = sum(max(its) / weight for its, weight in zip(costs, weights, strict=True))
    work, left = dict.fromkeys("fm", 0.0), Counter(f=len(costs[0]), m=len(costs[1]))
    while min(left.values()) > 0:
        ticket = queue.first()
        assert ticket is not None
        queue.start(ticket)
        queue.end(ticket, ticket.cost)
        work[ticket.client.name] += ticket.cost / ticket.client.weight
        left[ticket.client.name] -= 1
        assert abs(work["f"] - work["m"]) <= bound * (1 + 1e-9)


def test_who_takes_more_than_was_guessed_is_charged_for_it() -> None:
    queue, honest, sly = FairQueue(), Client("honest"), Client("sly")
    taken = Counter[str]()
    for number in range(100):
        queue.add(Ticket(honest, 100.0, float(number)))
        queue.add(Ticket(sly, 10.0, float(number)))
    for _ in range(100):
        ticket = queue.first()
        assert ticket is not None
        queue.start(ticket)
        queue.end(ticket, 100.0)
        taken[ticket.client.name] += 1
    assert taken == {"honest": 50, "sly": 50}


def test_who_was_away_has_saved_nothing() -> None:
    queue = FairQueue()
    for number in range(20):
        queue.add(Ticket(Client("always"), 1.0, float(number)))
    served(queue, 10)
    for number in range(20):
        queue.add(Ticket(Client("late"), 1.0, 100.0 + number))
    assert Counter(served(queue, 10)) == {"always": 5, "late": 5}


def test_the_newest_of_the_greediest_gives_way() -> None:
    queue, greedy, ann, light = FairQueue(), Client("greedy"), Client("ann", weight=4), Client("light")
    anns = [Ticket(ann, 1.0, float(number)) for number in range(MOST_OF_ONE)]
    assert [queue.add(ticket) for ticket in anns] == [None] * MOST_OF_ONE
    one_more = Ticket(ann, 1.0, 1000.0)
    assert queue.add(one_more) is one_more, "one client may not fill the queue"
    its = [Ticket(greedy, 1.0, float(number)) for number in range(MOST_WAITING - MOST_OF_ONE - 1)]
    assert [queue.add(ticket) for ticket in its] == [None] * len(its)
    assert queue.add(Ticket(light, 1.0, 2000.0)) is None
    assert queue.add(Ticket(light, 1.0, 2001.0)) is its[-1], "ann has more, but less for her weight"
    late = Ticket(greedy, 1.0, 2002.0)
    assert queue.add(late) is late
    assert queue.waiting == MOST_WAITING
    assert "light" in served(queue, 3)


def test_what_is_put_back_is_next_again() -> None:
    queue = FairQueue()
    tickets = [Ticket(Client(name), 50.0, since) for since, name in enumerate(("a", "a", "b", "a"))]
    for ticket in tickets:
        queue.add(ticket)
    first = queue.first()
    assert first is tickets[0]
    queue.start(first)
    queue.add(Ticket(Client("c"), 1.0, 9.0))
    queue.put_back(first)
    assert queue.first() is first
    assert served(queue, 5) == ["a", "b", "c", "a", "a"]


def test_newcomers_are_those_of_whom_nothing_runs_while_others_have_several() -> None:
    queue = FairQueue()
    for since, name in enumerate(("a", "a", "a", "b", "b")):
        queue.add(Ticket(Client(name), 1.0, since))
    assert queue.first(newcomers=True) is None, "nobody has more than others"
    for _ in range(3):
        ticket = queue.first()
        assert ticket is not None
        queue.start(ticket)  # a, b, a
    assert queue.first() is not None
    assert queue.first(newcomers=True) is None, "something of b runs"
    queue.add(Ticket(Client("c"), 1.0, 7.0))
    newcomer = queue.first(newcomers=True)
    assert newcomer is not None
    assert newcomer.client.name == "c"


def test_shares_are_by_weight_among_those_who_wait() -> None:
    queue, ann = FairQueue(), Client("ann", weight=3)
    assert queue.share(ann) == 1.0
    queue.add(Ticket(Client("ben"), 1.0, 0.0))
    queue.add(Ticket(ann, 1.0, 0.0))
    assert queue.share(ann) == pytest.approx(0.75)


def test_clients_who_come_once_are_forgotten() -> None:
    queue, stays = FairQueue(), Ticket(Client("stays"), 1.0, 0.0)
    queue.add(stays)
    queue.start(stays)
    for number in range(2 * MAX_CLIENTS):
        ticket = Ticket(Client(str(number)), 1e6, float(number))
        queue.add(ticket)
        queue.start(ticket)
        queue.end(ticket, 1e6)
    assert len(queue._flows) <= MAX_CLIENTS + 2
    queue.end(stays, 1.0)
    assert not queue._flows


class Everything(RuleBasedStateMachine):
    """Any order of all that can happen to a queue: nothing is lost, and nobody is served twice."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue()
        self.waiting: list[Ticket] = []
        self.running: list[Ticket] = []
        self.now = 0.0

    @rule(name=st.sampled_from("abcd"), weight=st.sampled_from([0.5, 1.0, 3.0]), cost=st.floats(0, 1000))
    def come(self, name: str, weight: float, cost: float) -> None:
        self.now += 1
        ticket = Ticket(Client(name, weight=weight), cost, self.now)
        self.waiting.append(ticket)
        assert self.queue.add(ticket) is None

    @precondition(lambda self: self.waiting)
    @rule()
    def start(self) -> None:
        ticket = self.queue.first()
        assert ticket is not None
        oldest = min(
            (other for other in self.waiting if other.client.name == ticket.client.name),
            key=lambda other: other.since,
        )
        assert ticket is oldest
        self.queue.start(ticket)
        self.waiting.remove(ticket)
        self.running.append(ticket)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.waiting))
        self.queue.drop(ticket)
        self.waiting.remove(ticket)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), cost=st.floats(0, 1000), back=st.booleans())
    def end(self, data: st.DataObject, cost: float, back: bool) -> None:
        ticket = data.draw(st.sampled_from(self.running))
        self.running.remove(ticket)
        if back:
            self.queue.put_back(ticket)
            self.waiting.append(ticket)
        else:
            self.queue.end(ticket, cost)

    @invariant()
    def all_are_counted(self) -> None:
        assert (self.queue.waiting, self.queue.running) == (len(self.waiting), len(self.running))
        assert self.queue.oldest() == min((ticket.since for ticket in self.waiting), default=None)
        if not self.waiting and not self.running:
            assert not self.queue._flows


TestEverything = Everything.TestCase
TestEverything.settings = settings(derandomize=True, deadline=None)
