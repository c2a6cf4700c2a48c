"""One stage among peers that send it whatever they like, in any order: what it does, and for whom."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.bounded import CONTEXT, HIDDEN
from support.one_stage import INBOX, SEATS, OneStage

from p2pllm.scheduling import PeerId
from p2pllm.serving.stage.seat import RESERVED_S, Seat
from p2pllm.transport import Close, Hidden, Open, Renew, Reroute, Resume, Token, Tokens, Where

OWN, NEXT, BEFORE, ENTRY, OTHER = (digit * 40 for digit in "abcde")
EVERYBODY = (OWN, NEXT, BEFORE, ENTRY, OTHER)
CHAINS = (
    ((OWN, 0, 6),),
    ((OWN, 0, 3), (NEXT, 3, 6)),
    ((OWN, 0, 3), (BEFORE, 3, 5), (OTHER, 5, 6)),
    ((BEFORE, 0, 3), (OWN, 3, 6)),
    ((NEXT, 0, 1), (OTHER, 1, 3), (OWN, 3, 6)),
    ((BEFORE, 0, 2), (OWN, 2, 4), (NEXT, 4, 6)),
    ((OTHER, 0, 1), (ENTRY, 1, 2), (OWN, 2, 4), (OTHER, 4, 6)),
    ((OWN, 0, 3), (NEXT, 3, 5), (OWN, 5, 6)),
    ((NEXT, 0, 6),),
)
EOS, LEASE_S = 7, 10.0

Address = tuple[str, int, int]
Chain = tuple[tuple[PeerId, int, int], ...]

RIGHT = ""
"""Whoever may send it."""

senders = st.sampled_from((*(RIGHT,) * 8, *EVERYBODY))
numbers = st.integers(0, SEATS - 1)
positions = st.integers(0, 12)
chains = st.sampled_from(CHAINS)
misses = st.sampled_from((*((0, 0),) * 8, (0, 1), (0, -1), (1, 0), (-1, 0)))
"""Most frames name a seat that is taken; some are just one off, in its stage or its generation."""

taken = precondition(lambda machine: machine.it.seats)


class Stage(RuleBasedStateMachine):
    """Everybody may send anything; `OneStage` knows what may come of it."""

    @initialize(first=chains, second=chains)
    def start(self, first: Chain, second: Chain) -> None:
        self.it = OneStage(OWN)
        self.opens(RIGHT, ENTRY, "s", RIGHT, 0, first, 16, True)
        self.opens(RIGHT, OTHER, "t", RIGHT, 0, second, 16, False)

    def aim(self, number: int, miss: tuple[int, int] = (0, 0)) -> tuple[Seat, Address]:
        """One of the seats that are taken, and its address, or one beside that."""
        seats = self.it.seats
        seat = seats[number % len(seats)]
        session, stage, generation = seat.address
        return seat, (session, max(0, stage + miss[0]), max(0, generation + miss[1]))

    def deliver(self, sender: PeerId, seat: Seat, message: Any, times: int = 1) -> None:
        """From ``sender``, or whoever of the seat's chain may send it."""
        right = seat.previous_peer if isinstance(message, Hidden | Token) else seat.entry
        self.it.deliver(sender or right, message, times)

    # What peers send, sensible or not

    @rule(
        sender=senders,
        entry=st.sampled_from((ENTRY, OTHER, NEXT)),
        name=st.sampled_from("sstu"),
        owner=senders,
        generation=st.sampled_from((0, 0, 1)),
        chain=chains,
        reserve=st.sampled_from((16, 16, 16, 0, 10**6)),
        begins=st.sampled_from((True, True, False)),
    )
    def opens(
        self,
        sender: PeerId,
        entry: PeerId,
        name: str,
        owner: PeerId,
        generation: int,
        chain: Chain,
        reserve: int,
        begins: bool,
    ) -> None:
        """The session is ``owner``'s by its id."""
        session = name + (owner or entry)
        more = reserve, 0.0, 1.0, 0, 0, (EOS,), CONTEXT - 1, LEASE_S
        for stage, (peer, _, _) in enumerate(chain):
            if peer == OWN or len(chain) == 1:
                self.it.deliver(sender or entry, Open(session, stage, generation, chain, entry, *more))
        self.begin(0 if begins else None)

    def begin(self, first: int | None) -> None:
        """Let all seats begin that wait for it, unless this is None."""
        for seat in self.it.seats:
            if first is not None and not seat.resumed.is_set():
                self.it.deliver(seat.entry, Resume(*seat.address, min(first, seat.held)))

    @taken
    @rule(
        sender=senders,
        number=numbers,
        later=st.sampled_from((1, 1, 1, 0, 2)),
        other=st.integers(0, 20),
        resume=positions,
        begins=st.none() | positions,
    )
    def reroutes(
        self, sender: PeerId, number: int, later: int, other: int, resume: int, begins: int | None
    ) -> None:
        """Mostly to a chain in which the seat stays."""
        seat, (session, stage, generation) = self.aim(number, (0, later))
        own = seat.plan.stages[stage]
        fitting = [chain for chain in CHAINS if own in chain]
        options = [*fitting, *fitting, *CHAINS]
        chain = options[other % len(options)]
        stage = chain.index(own) if own in chain else 0
        self.deliver(sender, seat, Reroute(session, stage, generation, chain, resume))
        self.begin(begins)

    @taken
    @rule(
        sender=senders,
        number=numbers,
        miss=misses,
        first=positions,
        asks=st.sampled_from((False, False, True)),
    )
    def resumes(self, sender: PeerId, number: int, miss: tuple[int, int], first: int, asks: bool) -> None:
        seat, address = self.aim(number, miss)
        first = min(first, seat.held)
        self.deliver(sender, seat, Where(*address) if asks else Resume(*address, first))

    @taken
    @rule(
        sender=senders,
        number=numbers,
        miss=misses,
        back=st.sampled_from((0, 0, 0, 1, 3, -9)),
        rows=st.sampled_from((1, 4, 9)),
        width=st.sampled_from((HIDDEN, HIDDEN, HIDDEN, 3)),
        times=st.sampled_from((1, 1, 1, 2 * INBOX)),
    )
    def works(
        self,
        sender: PeerId,
        number: int,
        miss: tuple[int, int],
        back: int,
        rows: int,
        width: int,
        times: int,
    ) -> None:
        """What comes next, or again, or far ahead; once, or as a flood."""
        seat, address = self.aim(number, miss)
        position = max(0, seat.position - back)
        hidden = "bfloat16", (rows, width), bytes(2 * rows * width)
        tokens = Tokens(*address, position, (1,) * rows, True)
        first = seat.plan.stage == 0
        self.deliver(sender, seat, tokens if first else Hidden(*address, position, True, *hidden), times)

    @taken
    @rule(sender=senders, number=numbers, miss=misses)
    def goes_round(self, sender: PeerId, number: int, miss: tuple[int, int]) -> None:
        """A token comes from the last stage."""
        seat, (session, _, generation) = self.aim(number, miss)
        self.deliver(sender, seat, Token(session, 0, generation, seat.position, 1, ""))

    @taken
    @rule(sender=senders, number=numbers, shape=st.sampled_from(((HIDDEN,), (1, 1, HIDDEN))))
    def nonsense(self, sender: PeerId, number: int, shape: tuple[int, ...]) -> None:
        seat, address = self.aim(number)
        data = bytes(2 * math.prod(shape))
        self.deliver(sender, seat, Hidden(*address, 0, True, "bfloat16", shape, data))

    @taken
    @rule(sender=senders, number=numbers, prefix=st.sampled_from((b"", bytes(8), bytes(8 * CONTEXT))))
    def closes(self, sender: PeerId, number: int, prefix: bytes) -> None:
        seat, (session, _, _) = self.aim(number)
        self.deliver(sender, seat, Close(session, prefix))

    @taken
    @rule(sender=senders, number=numbers)
    def renews(self, sender: PeerId, number: int) -> None:
        seat, (session, _, _) = self.aim(number)
        self.deliver(sender, seat, Renew(session))

    # What happens besides

    @rule(
        weather=st.sampled_from(("fine", "fine", "slow", "broken", "leaving", "unlinked")),
        peer=st.sampled_from((NEXT, NEXT, BEFORE, ENTRY)),
    )
    def weather_changes(self, weather: str, peer: PeerId) -> None:
        """The executor is stuck or fails, this peer leaves, or a link breaks; or nothing of all that."""
        it = self.it
        it.executor.breaks = weather == "broken"
        it.settle(it.executor.free.clear if weather == "slow" else it.executor.free.set)
        it.settle(lambda: setattr(it.stages, "accepting", weather != "leaving"))
        it.down.clear()
        if weather == "unlinked":
            it.down.add(peer)
            it.settle(lambda: it.stages.peer_down(peer))
            assert all(seat.task is None for seat in it.seats if seat.entry == peer)

    @rule(seconds=st.sampled_from((*(LEASE_S / 3,) * 6, LEASE_S + 1)))
    def time_passes(self, seconds: float) -> None:
        self.it.loop.now += seconds
        self.it.settle()
        if seconds > max(LEASE_S, RESERVED_S):
            assert not self.it.seats

    @invariant()
    def all_is_well(self) -> None:
        self.it.check()

    def teardown(self) -> None:
        """What is not renewed ends; and so does everything when the peer does."""
        if not hasattr(self, "it"):
            return
        it = self.it
        try:
            self.weather_changes("fine", NEXT)
            self.time_passes(2 * LEASE_S)
            it.loop.run_until_complete(asyncio.wait_for(it.stages.idle(), 1))
            self.opens(ENTRY, ENTRY, "s", RIGHT, 0, CHAINS[7], 16, True)
            assert len(it.seats) == 2
            it.stop()
            self.opens(ENTRY, ENTRY, "t", RIGHT, 0, CHAINS[0], 16, True)
            assert not it.seats
        finally:
            it.close()


TestStage = Stage.TestCase
TestStage.settings = settings(max_examples=100, stateful_step_count=50, deadline=None, derandomize=True)


class Longer(Stage):
    """The same, for minutes."""


TestLonger = pytest.mark.slow(Longer.TestCase)
TestLonger.settings = settings(max_examples=5000, stateful_step_count=80, deadline=None)
