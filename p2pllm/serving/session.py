"""One open chain as its entry knows it: reserve on every stage, feed the prompt, take tokens, let go."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from p2pllm.errors import FrameError, LinkError, RequestError
from p2pllm.execution import SamplingParams
from p2pllm.scheduling import Chain, PeerId
from p2pllm.serving.prefix import prefix_names, upstream_name
from p2pllm.transport import Close, Failed, Message, Open, Opened, Renew, Token, Tokens

__all__ = ["RESERVE_AHEAD", "Generation", "Network", "Session", "StageLostError"]

CHUNK = 256
"""Prompt tokens per frame: transfer and compute of neighbouring stages overlap."""

RESERVE_AHEAD = 256
"""Tokens of KV cache to reserve beyond the prompt; stages extend it as the answer grows."""

LEASE_S = 10.0
OPEN_DEADLINE_S = 5.0
SILENCE_S = 2.0
"""Without a token for this long the stages are asked whether they still live."""

TOKEN_DEADLINE_S = 300.0


@dataclass(frozen=True, slots=True)
class Generation:
    """One request: ``prompt`` token ids, how to sample, and where to stop."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int

    @property
    def limit(self) -> int:
        """The position of the last token that may be generated."""
        return len(self.prompt) + self.max_tokens - 1


@dataclass(frozen=True, slots=True)
class Network:
    """What a session needs of the world around it; ``own`` is the entry itself.

    ``send`` queues a message, ``connect`` brings up a link, ``ping`` measures a round trip (s); all of them
    raise LinkError. ``eos`` are the ids that end a text, ``vocabulary`` is above all token ids. ``numerics``
    says how a peer rounds, ``secret`` keys the names of what stages keep for later sessions.
    """

    own: PeerId
    send: Callable[[PeerId, Message], None]
    connect: Callable[[PeerId], Awaitable[None]]
    ping: Callable[[PeerId], Awaitable[float]]
    eos: frozenset[int]
    vocabulary: int
    numerics: Callable[[PeerId], str]
    secret: bytes


class StageLostError(Exception):
    """The session cannot go on; routes should avoid ``peers`` for the rest of the request.

    ``hop`` is (from, to) when only the way between two stages is broken; ``busy``: the peers live, but
    refused.
    """

    def __init__(
        self,
        peers: frozenset[PeerId],
        reason: str,
        *,
        hop: tuple[PeerId, PeerId] | None = None,
        busy: bool = False,
    ) -> None:
        super().__init__(reason)
        self.peers = peers
        self.hop = hop
        self.busy = busy


class Session:
    """Use through ``opened``. Frames for it arrive through ``receive``."""

    def __init__(self, chain: Chain, request: Generation, known: Sequence[int], network: Network) -> None:
        """``known``: the prompt and what was generated before, on other chains."""
        self.id = secrets.token_hex(16)
        self.chain = chain
        self.peers = frozenset(stage.peer for stage in chain.stages)
        self._request = request
        self._known = tuple(known)
        self._said: list[int] = []
        self._network = network
        self._tokens: asyncio.Queue[Token] = asyncio.Queue(request.max_tokens)
        self._answers: dict[int, Opened] = {}
        self._news = asyncio.Event()
        self._lost: StageLostError | None = None

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Open the chain, all or nothing, and feed what is known; free it everywhere on the way out.

        Raises StageLostError.
        """
        renewal = asyncio.create_task(self._renew())
        try:
            await self._reach()
            await self._open()
            for start in range(self._cached(), len(self._known), CHUNK):
                chunk = self._known[start : start + CHUNK]
                self._tell(0, Tokens(self.id, 0, start, chunk, start + CHUNK >= len(self._known)))
            yield
        finally:
            # First, for what follows may be cancelled.
            close = Close(self.id, self._kept())
            for peer in self.peers:
                with suppress(LinkError):  # then its lease ends by itself
                    self._network.send(peer, close)
            renewal.cancel()
            await asyncio.wait({renewal})

    def receive(self, sender: PeerId, message: Opened | Token | Failed) -> None:
        """Take in one frame; frames from peers that are not the stage they speak for are dropped."""
        stages = self.chain.stages
        stage = message.stage if not isinstance(message, Token) else len(stages) - 1
        if not 0 <= stage < len(stages) or stages[stage].peer != sender:
            return
        match message:
            case Opened():
                self._answers[stage] = message
                self._news.set()
            case Failed():
                self.lose(self._broken(sender, message.unreached, f"{sender[:8]}: {message.reason}"))
            case Token() if self._tokens.full():
                self.lose(StageLostError(frozenset({sender}), f"{sender[:8]} sends more tokens than asked"))
            case Token():
                self._tokens.put_nowait(message)
                self._news.set()

    def lose(self, problem: StageLostError) -> None:
        """Wake whoever waits for this session with the bad news; the first reason counts."""
        self._lost = self._lost or problem
        self._news.set()

    def _broken(
        self, sender: PeerId, unreached: PeerId, reason: str, *, busy: bool = False
    ) -> StageLostError:
        """What a stage's complaint means: it is the one to avoid, or else only the way to its neighbour."""
        if unreached in self.peers - {sender}:
            return StageLostError(frozenset(), reason, hop=(sender, unreached))
        return StageLostError(frozenset({sender}), reason, busy=busy)

    async def next(self, position: int) -> Token:
        """The token at ``position``. Silence alone is not death: slow peers still answer pings.

        Raises StageLostError.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + TOKEN_DEADLINE_S
        while self._tokens.empty():
            if self._lost is not None:
                raise self._lost
            if not await self._heard(SILENCE_S):
                await self._check_alive()
            if loop.time() > deadline:
                raise StageLostError(self.peers, f"no token in {TOKEN_DEADLINE_S:.0f} s")
        token = self._tokens.get_nowait()
        if token.position != position or token.token >= self._network.vocabulary:
            sender = self.chain.stages[-1].peer
            raise StageLostError(frozenset({sender}), f"{sender[:8]} sent a token that cannot be")
        self._said.append(token.token)
        return token

    async def _problems(
        self, ask: Callable[[PeerId], Awaitable[object]], peers: frozenset[PeerId]
    ) -> dict[PeerId, str]:
        """Ask all of them at once; those for whom that raised LinkError, and what it said."""

        async def problem(peer: PeerId) -> str:
            try:
                await ask(peer)
            except LinkError as error:
                return str(error) or "no answer"
            return ""

        ordered = sorted(peers)
        found = zip(ordered, await asyncio.gather(*map(problem, ordered)), strict=True)
        return {peer: reason for peer, reason in found if reason}

    async def _reach(self) -> None:
        """Bring up the links to all stages."""
        unreached = await self._problems(self._network.connect, self.peers)
        if unreached:
            raise StageLostError(frozenset(unreached), "; ".join(unreached.values()))

    async def _open(self) -> None:
        request, sampling = self._request, self._request.sampling
        stages = tuple((stage.peer, stage.start, stage.end) for stage in self.chain.stages)
        numerics = [(stage, self._network.numerics(stage.peer)) for stage in self.chain.stages]
        prefix = prefix_names(self._known, self._network.secret)
        for index in range(len(stages)):
            plan = Open(
                session=self.id,
                stage=index,
                stages=stages,
                entry=self._network.own,
                reserve=min(len(self._known) + RESERVE_AHEAD, request.limit + 1),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                seed=sampling.seed,
                eos=tuple(sorted(self._network.eos)),
                limit=request.limit,
                lease_s=LEASE_S,
                prefix=prefix,
                upstream=upstream_name(numerics[:index]),
            )
            self._tell(index, plan)
        deadline = asyncio.get_running_loop().time() + OPEN_DEADLINE_S
        while len(self._answers) < len(stages):
            heard = await self._heard(deadline - asyncio.get_running_loop().time())
            if self._lost is not None:
                raise self._lost
            for answer in self._answers.values():
                if not answer.ok:
                    peer = stages[answer.stage][0]
                    reason = f"{peer[:8]} refused: {answer.reason}"
                    raise self._broken(peer, answer.unreached, reason, busy=True)
            if not heard:
                silent = frozenset(
                    peer for index, (peer, *_) in enumerate(stages) if index not in self._answers
                )
                raise StageLostError(silent, f"no answer from {_short(silent)}")

    def _cached(self) -> int:
        """How many tokens no stage needs any more; the last one is always fed, for what comes after it."""
        return min(*(answer.cached for answer in self._answers.values()), len(self._known) - 1)

    def _kept(self) -> bytes:
        """Names of the blocks that all stages have filled: the last token that came was not fed to them."""
        filled = (*self._known, *self._said[:-1]) if self._said else ()
        return prefix_names(filled, self._network.secret)

    def _tell(self, stage: int, message: Message) -> None:
        peer = self.chain.stages[stage].peer
        try:
            self._network.send(peer, message)
        except LinkError as error:
            raise StageLostError(frozenset({peer}), f"peer {peer[:8]}: {error}") from error
        except FrameError as error:
            raise RequestError(f"this request cannot be sent to a stage: {error}") from error

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            for peer in self.peers:
                try:
                    self._network.send(peer, Renew(self.id))
                except LinkError as error:
                    self.lose(StageLostError(frozenset({peer}), f"peer {peer[:8]}: {error}"))

    async def _heard(self, seconds: float) -> bool:
        """Wait for news, at most so long; whether there was any."""
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return False
        self._news.clear()
        return True

    async def _check_alive(self) -> None:
        gone = frozenset(await self._problems(self._network.ping, self.peers - {self._network.own}))
        if gone:
            self.lose(StageLostError(gone, f"no sign of life from {_short(gone)}"))


def _short(peers: frozenset[PeerId]) -> str:
    return ", ".join(peer[:8] for peer in sorted(peers))
