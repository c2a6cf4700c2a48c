"""One session as its entry knows it: chain after chain under one id, until its last token has come.

A chain is opened all or nothing. Stages that were in the one before keep what they hold; from what all of
them say, it follows who sends what again (`rerouting.py`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress

from p2pllm.errors import LinkError, SessionError
from p2pllm.scheduling import Chain, PeerId, Stage
from p2pllm.serving.entry.filling import Filling
from p2pllm.serving.entry.opening import LEASE_S, feeding, opening, rounding, rows_of
from p2pllm.serving.entry.prefix import prefix_names
from p2pllm.serving.entry.reaching import reach, short, tell
from p2pllm.serving.entry.request import Generation, Network
from p2pllm.serving.entry.rerouting import resumption
from p2pllm.serving.entry.suspicion import Ask, Suspect, Suspicion, Wait
from p2pllm.serving.entry.transcript import Transcript
from p2pllm.serving.entry.trouble import Cause, Pending, StageLostError, problem_of
from p2pllm.transport import (
    MAX_GENERATION,
    Close,
    Failed,
    Message,
    Open,
    Opened,
    Renew,
    Reroute,
    Resume,
    Token,
    Where,
)

__all__ = ["Session"]

OPEN_DEADLINE_S = 5.0
REROUTE_DEADLINE_S = 1.5
"""Somebody waits for the next token, and others may have failed as well."""


class Session:
    """Use within ``opened``. Frames for it arrive through ``receive``."""

    def __init__(self, request: Generation, network: Network) -> None:
        self.id = secrets.token_hex(12) + network.own
        self.request = request
        self.transcript = Transcript(request, network.vocabulary)
        self.chain = Chain((), 0.0)
        self.generation = -1
        self.cached = 0
        """Tokens that all stages of its first chain had when they were opened."""
        self.kept = b""
        """The names of the blocks that its stages were left with."""
        self.filling: Filling | None = None
        """What is made ready for the next chain."""
        self._claimed = -1
        self.seats: frozenset[Stage] = frozenset()
        """Stages that hold something for this session."""
        self.newcomers: frozenset[Stage] = frozenset()
        """Those of the chain that were in none before."""
        self._network = network
        self._answers: dict[int, Opened] = {}
        self.pending = Pending()
        self._news = asyncio.Event()
        self._suspicion: Suspicion | None = None
        self._rounding = b""
        self._was_fed = False

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Keep what is opened within alive; free it everywhere on the way out."""
        renewal = asyncio.create_task(self._renew())
        try:
            yield
        finally:
            # First, for what follows may be cancelled.
            self.kept = self.transcript.names(self._network.secret)
            self.let_go(self.kept)
            renewal.cancel()
            await asyncio.wait({renewal})

    @property
    def interval_s(self) -> float:
        """What tokens would take lately (s), were it not for the load on all; 0 if that is not known."""
        return 0.0 if self._suspicion is None else self._suspicion.interval_s / self._suspicion.load

    def uses(self, peer: PeerId) -> bool:
        """Whether anything of this session is at a peer, or is to be."""
        return any(stage.peer == peer for stage in {*self.chain.stages, *self.seats})

    def let_go(self, kept: bytes = b"", *, peers: Iterable[PeerId] | None = None) -> None:
        """Free what is held at ``peers``, by default everywhere, but for the blocks that ``kept`` names."""
        holding = {stage.peer for stage in self.seats}
        gone = holding if peers is None else holding & set(peers)
        for peer in gone:
            with suppress(LinkError):  # then it ends with the link, or with its lease
                self._network.send(peer, Close(self.id, kept))
        self.seats = frozenset(stage for stage in self.seats if stage.peer not in gone)

    def receive(self, sender: PeerId, message: Opened | Token | Failed) -> None:
        """Take in one frame; those of other chains, and from peers that are not the stage they speak for, are
        dropped.
        """
        if self.filling is not None and message.generation == self.filling.generation:
            if not isinstance(message, Token):
                self.filling.receive(sender, message)
            return
        stages = self.chain.stages
        index = message.stage if not isinstance(message, Token) else len(stages) - 1
        if (
            message.generation != self.generation
            or not 0 <= index < len(stages)
            or stages[index].peer != sender
        ):
            return
        now = asyncio.get_running_loop().time()
        match message:
            case Opened():
                self._answers[index] = message
                if self._suspicion is not None:
                    self._suspicion.answer(index, message.held, message.step_s, now)
            case Failed():
                neighbours = {stage.peer for stage in stages} - {sender}
                problem = problem_of(message, sender, neighbours)
                if problem.cause in ("busy", "lost") and problem.peers:
                    self.seats -= {stages[index]}
                self.lose(problem)
            case Token() if self._suspicion is not None and not self.transcript.has_ended:
                self._suspicion.token(now)
                if not self.transcript.take(message):
                    self.lose(StageLostError({sender}, f"{sender[:8]} sent a token that cannot be"))
        self._news.set()

    def lose(self, problem: StageLostError) -> None:
        """Wake whoever waits for this session with the bad news."""
        self.pending.add(problem)
        self._news.set()

    def put_off(self, problem: StageLostError, seconds: float) -> None:
        """Nothing can be done about something yet: come back to it, unless the chain is another by then."""
        until = asyncio.get_running_loop().time() + seconds
        if problem.cause == "slow" and self._suspicion is not None:
            self._suspicion.pardon(until)
        else:
            self.pending.put_off(problem, until)

    async def next(self) -> Token:
        """The next token. Raises StageLostError when something is to be done about the chain."""
        while True:
            if self.pending and not self.transcript.has_ended:
                raise self.pending.first()
            if self.transcript.ready:
                return self.transcript.ready.popleft()
            await self._listen()

    async def establish(self, chain: Chain, work_s: Mapping[PeerId, float]) -> int:
        """Go on with ``chain``, on which a token keeps each peer at work for ``work_s`` seconds.

        Returns how many layer-tokens are computed that others had computed before. Raises StageLostError
        when the chain cannot be had, and SessionError when there were too many.
        """
        self._begin(chain, self._claim())
        known, resume = self.transcript.known, self.transcript.last
        await reach({stage.peer for stage in {*chain.stages} - self.newcomers}, self._network.connect)
        for index, stage in enumerate(chain.stages):
            if stage not in self.newcomers:
                self._tell(index, Reroute(self.id, index, self.generation, rows_of(chain), resume))
        await reach({stage.peer for stage in self.newcomers}, self._network.connect)
        if self.pending:
            raise self.pending.first()
        self.seats |= self.newcomers
        prefix = prefix_names(known, self._network.secret) if self.newcomers else b""
        for index, stage in enumerate(chain.stages):
            if stage in self.newcomers:
                self._tell(index, self._invitation(index, prefix))
        await self._all_answered()
        self.let_go(peers={stage.peer for stage in self.seats - {*chain.stages}})
        held = [self._answers[index].held for index in range(len(chain.stages))]
        plan = resumption(chain.stages, held, resume)
        for index, first in enumerate(plan.forward_from):
            self._tell(index, Resume(self.id, index, self.generation, first))
        for chunk in feeding(self.id, self.generation, known, plan.feed_from, sample=True):
            self._tell(0, chunk)
        times = [work_s.get(stage.peer, 0.0) for stage in chain.stages]
        now = asyncio.get_running_loop().time()
        self._suspicion = Suspicion(times, chain.latency_s, len(known), now)
        if self._was_fed:
            return plan.recomputed
        self._was_fed, self.cached = True, min(*held, resume)
        return 0

    async def fill(self, chain: Chain) -> int:
        """Make the new stages of a chain ready to take over; returns how many layer-tokens they compute.

        Raises StageLostError when that cannot be done; then they are let go again.
        """
        generations = self.generation, self._claim()
        filling = Filling(chain, self.chain, session=self.id, generations=generations, network=self._network)
        self.filling = filling
        self.seats |= {*filling.newcomers.values()}
        try:
            return await filling.run(self.request, tuple(self.transcript.known))
        except BaseException:
            self.filling = None
            busy = {stage.peer for stage in self.chain.stages}
            self.let_go(peers={stage.peer for stage in filling.newcomers.values()} - busy)
            raise

    def _claim(self) -> int:
        """The next number for a chain."""
        if self._claimed == MAX_GENERATION:
            raise SessionError(f"gave up after {MAX_GENERATION} chains")
        self._claimed += 1
        return self._claimed

    def _begin(self, chain: Chain, generation: int) -> None:
        """From now on only frames of this chain count."""
        before, self._rounding = self._rounding, rounding(chain, self._network.numerics)
        self.transcript.begin_chain(is_alike=before in (b"", self._rounding))
        self.chain = chain
        self.generation = generation
        self.filling = None
        self._answers.clear()
        self.pending.begin()
        self._suspicion = None
        self._news.clear()
        # Seats of one peer are let go together; who is in the new chain is opened there once more.
        dropped = {stage.peer for stage in self.seats - {*chain.stages}}
        self.let_go(peers=dropped & {stage.peer for stage in chain.stages})
        self.newcomers = frozenset(chain.stages) - self.seats

    async def _listen(self) -> None:
        """Wait for news, and when there are none find out why."""
        now = asyncio.get_running_loop().time()
        until = self.pending.look(now)
        if self.pending:
            return
        look = Wait(LEASE_S) if self._suspicion is None else self._suspicion.look(now)
        match look:
            case Wait(seconds):
                await self._heard(min(seconds, until - now))
            case Ask():
                for index, stage in enumerate(self.chain.stages):
                    with suppress(LinkError):  # which then is its answer
                        self._network.send(stage.peer, Where(self.id, index, self.generation))
            case Suspect(stages, reason, is_slow):
                peers = {self.chain.stages[index].peer for index in stages}
                cause: Cause = "slow" if is_slow else "lost"
                self.lose(StageLostError(peers, f"{short(peers)}: {reason}", cause=cause))

    def _invitation(self, index: int, prefix: bytes) -> Open:
        return opening(
            self.chain,
            index,
            session=self.id,
            generation=self.generation,
            request=self.request,
            known=self.transcript.known,
            prefix=prefix,
            network=self._network,
        )

    async def _all_answered(self) -> None:
        patience = REROUTE_DEADLINE_S if self.generation else OPEN_DEADLINE_S
        deadline = asyncio.get_running_loop().time() + patience
        while len(self._answers) < len(self.chain.stages):
            heard = await self._heard(deadline - asyncio.get_running_loop().time())
            if self.pending:
                raise self.pending.first()
            if not heard:
                stages = enumerate(self.chain.stages)
                silent = {stage.peer for index, stage in stages if index not in self._answers}
                raise StageLostError(silent, f"no answer from {short(silent)}")

    def _tell(self, index: int, message: Message) -> None:
        tell(self._network, self.chain.stages[index].peer, message)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            for peer in {stage.peer for stage in self.seats}:
                try:
                    tell(self._network, peer, Renew(self.id))
                except StageLostError as problem:
                    self.lose(problem)

    async def _heard(self, seconds: float) -> bool:
        """Wait for news, at most so long; whether there was any."""
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return False
        self._news.clear()
        return True
