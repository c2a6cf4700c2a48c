"""Peers that elect a leader over a network that loses, delays and parts, in simulated time."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterable

from p2pllm.records import ClaimBody
from p2pllm.swarm.placement.election import Election

__all__ = ["Electorate"]

TICK_S = 0.1
NEWS_S = 1.5
GONE_S = 5.5


class Voter:
    """One process: its election, its clock, and whom it has heard of when."""

    def __init__(self, name: str, epoch: int, clock: float, born: float) -> None:
        self.name = name
        self.clock = clock  # how wrong it is
        self.born = born
        self.election = Election(name, epoch)
        self.heard: dict[str, float] = {}
        self.news_due = born
        self.leaving = False


class Electorate:
    """All of them; ``leaders`` lists each (time, peer, epoch) in which a peer said that it may issue."""

    def __init__(self, seed: int, *, loss: float = 0.0, delay: float = 0.3) -> None:
        self.rng = random.Random(seed)
        self.loss, self.delay = loss, delay
        self.now = 0.0
        self.voters: dict[str, Voter] = {}
        self.disk: dict[str, int] = {}
        self.side: dict[str, int] = {}
        self.leaders: list[tuple[float, str, int]] = []
        self._mail: list[tuple[float, int, str, str, ClaimBody | None, int]] = []
        self._number = itertools.count(1)

    def join(self, name: str, *, knows: bool = True) -> None:
        """Start a peer, with what it kept on disk; by the time it joins it ``knows`` who is there."""
        voter = Voter(name, self.disk.get(name, 0), self.rng.uniform(-5000, 5000), self.now)
        self.voters[name] = voter
        if knows:
            for other in self.voters.values():
                if self.connected(name, other.name):
                    voter.heard[other.name] = self.now
                    leads = other.election.standing
                    if leads is not None and other is not voter:
                        seq = next(self._number)
                        heapq.heappush(
                            self._mail, (self.now, seq, other.name, name, ClaimBody(leads, 0), seq)
                        )

    def crash(self, name: str) -> None:
        self.disk[name] = self.voters.pop(name).election.epoch

    def part(self, *sides: Iterable[str]) -> None:
        self.side = {name: number for number, side in enumerate(sides) for name in side}

    def connected(self, one: str, other: str) -> bool:
        return self.side.get(one, 0) == self.side.get(other, 0)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now = round(self.now + TICK_S, 3)
            self._deliver()
            for voter in list(self.voters.values()):
                self._tick(voter)

    def eligible(self, voter: Voter) -> set[str]:
        others = {name for name, at in voter.heard.items() if self.now - at <= GONE_S}
        return others | (set() if voter.leaving else {voter.name})

    def agreed(self) -> str | None:
        """The leader whom all see, if it sees itself so and may issue, and nobody else does."""
        seen = {voter.election.leader for voter in self.voters.values()}
        issuing = [v.name for v in self.voters.values() if v.election.leads(self.now + v.clock)]
        return issuing[0] if len(issuing) == 1 and seen == set(issuing) else None

    def until_agreed(self, limit: float) -> float:
        """Seconds until all agree; AssertionError if they do not within ``limit``."""
        began = self.now
        while self.agreed() is None:
            assert self.now - began <= limit, {v.name: v.election.leader for v in self.voters.values()}
            self.run(TICK_S)
        return self.now - began

    def _tick(self, voter: Voter) -> None:
        local = self.now + voter.clock
        epoch = voter.election.tick(local, self.eligible(voter), joined=True)
        if voter.election.leads(local):
            assert voter.election.standing is not None
            self.leaders.append((self.now, voter.name, voter.election.standing))
        if epoch is not None and self._send(voter, ClaimBody(epoch, 0)):
            voter.election.published(local)
        if self.now >= voter.news_due and not voter.leaving:
            voter.news_due = self.now + NEWS_S * self.rng.uniform(0.9, 1.1)
            self._send(voter, None)

    def _send(self, voter: Voter, claim: ClaimBody | None) -> bool:
        sent = False
        number = next(self._number)
        for other in self.voters:
            if other != voter.name and self.connected(other, voter.name) and self.rng.random() >= self.loss:
                at = self.now + self.rng.uniform(0.01, self.delay)
                heapq.heappush(self._mail, (at, next(self._number), voter.name, other, claim, number))
                sent = True
        return sent

    def _deliver(self) -> None:
        while self._mail and self._mail[0][0] <= self.now:
            _, _, sender, receiver, claim, seq = heapq.heappop(self._mail)
            voter = self.voters.get(receiver)
            if voter is None or not self.connected(sender, receiver):
                continue
            if claim is None:
                voter.heard[sender] = self.now
            else:
                voter.election.hear(sender, claim, seq, self.now + voter.clock)
