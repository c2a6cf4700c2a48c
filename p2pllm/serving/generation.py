"""The entry side of sessions: from a prompt of token ids to a stream of token ids.

One request may need several sessions: when a peer of the chain is lost or refuses, the entry takes another
chain and goes on behind the last token it received. Sampling depends only on (tokens so far, parameters,
seed, position), so the client sees a pause and no token changed.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import structlog

from p2pllm.errors import BusyError, ContextLengthError, LinkError, NoRouteError, RequestError, SessionError
from p2pllm.execution import SamplingParams
from p2pllm.scheduling import Chain, PeerId
from p2pllm.serving.router import Router
from p2pllm.transport import Close, Failed, Message, Open, Opened, Renew, Token, Tokens

__all__ = ["Generated", "Generation", "Generator"]

ATTEMPTS = 5
"""Chains one request may try before the client gets an error."""

BLOCK = 16
CHUNK = 256
"""Prompt tokens per frame: transfer and compute of neighbouring stages overlap."""

RESERVE_AHEAD = 256
LEASE_S = 10.0
OPEN_DEADLINE_S = 5.0
SILENCE_S = 2.0
"""Without a token for this long the stages are asked whether they still live."""

TOKEN_DEADLINE_S = 300.0
BACK_OFF_S = 0.05

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Generation:
    """One request: ``prompt`` token ids, how to sample, and where to stop."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Generated:
    """One token, the chain that made it, and why it is the last ("stop", "length") or ""."""

    token: int
    chain: Chain
    final: str


class _StageLostError(Exception):
    """The session cannot go on; routes should avoid ``peers`` for the rest of this request."""

    def __init__(self, peers: frozenset[PeerId], reason: str, *, busy: bool = False) -> None:
        super().__init__(reason)
        self.peers = peers
        self.busy = busy


@dataclass(slots=True, eq=False)
class _Session:
    """What the entry knows of one open chain."""

    id: str
    chain: Chain
    tokens: asyncio.Queue[Token | _StageLostError]
    answers: dict[int, Opened] = field(default_factory=dict)
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    lost: _StageLostError | None = None

    @property
    def peers(self) -> frozenset[PeerId]:
        return frozenset(stage.peer for stage in self.chain.stages)

    def lose(self, error: _StageLostError) -> None:
        """Wake whoever waits for this session with the bad news; the first reason counts."""
        if self.lost is None:
            self.lost = error
            self.answered.set()
            if not self.tokens.full():
                self.tokens.put_nowait(error)


class Generator:
    """Runs requests as the entry. Frames for it arrive through ``receive``."""

    def __init__(
        self,
        *,
        own: PeerId,
        router: Router,
        send: Callable[[PeerId, Message], None],
        connect: Callable[[PeerId], Awaitable[None]],
        ping: Callable[[PeerId], Awaitable[float]],
        eos: frozenset[int],
        context: int,
        vocabulary: int,
        rng: random.Random,
    ) -> None:
        """``eos``: ids that end a text; ``context``: the most positions a session may have;
        ``vocabulary``: token ids are below it."""
        self._own = own
        self._router = router
        self._send = send
        self._connect = connect
        self._ping = ping
        self._eos = eos
        self._context = context
        self._vocabulary = vocabulary
        self._rng = rng
        self._sessions: dict[str, _Session] = {}

    @property
    def context(self) -> int:
        """The most tokens, prompt and answer together, that a session may have."""
        return self._context

    def receive(self, sender: PeerId, message: Opened | Token | Failed) -> None:
        """Take in one frame; frames from peers that are not the stage they speak for are dropped."""
        session = self._sessions.get(message.session)
        if session is None:
            return
        stages = session.chain.stages
        stage = message.stage if not isinstance(message, Token) else len(stages) - 1
        if not 0 <= stage < len(stages) or stages[stage].peer != sender:
            return
        match message:
            case Opened():
                session.answers[stage] = message
                if len(session.answers) == len(stages) or not message.ok:
                    session.answered.set()
            case Failed():
                session.lose(_StageLostError(frozenset({sender}), f"{sender[:8]}: {message.reason}"))
            case Token():
                if session.tokens.full():
                    session.lose(
                        _StageLostError(frozenset({sender}), f"{sender[:8]} sends more tokens than asked")
                    )
                else:
                    session.tokens.put_nowait(message)

    def peer_down(self, peer: PeerId) -> None:
        """The link to ``peer`` is gone: every session through it is lost."""
        for session in self._sessions.values():
            if peer in session.peers:
                session.lose(_StageLostError(frozenset({peer}), f"peer {peer[:8]} is gone"))

    async def generate(self, request: Generation) -> AsyncGenerator[Generated]:
        """Yield the tokens of one request as they arrive; closing the generator frees the chain everywhere.

        Raises: RequestError (can never succeed), NoRouteError (layers without a holder), BusyError (no KV
        cache anywhere), SessionError (broke off; what was yielded stands).
        """
        self._check(request)
        done: list[int] = []
        excluded: frozenset[PeerId] = frozenset()
        problem: _StageLostError | None = None
        for _ in range(ATTEMPTS):
            remaining = request.max_tokens - len(done)
            try:
                chain = self._router.chain(
                    expected_tokens=remaining,
                    kv_blocks=-(-(len(request.prompt) + len(done) + min(remaining, RESERVE_AHEAD)) // BLOCK),
                    excluded=excluded,
                )
            except NoRouteError as error:
                raise _final_error(error, problem) from error
            try:
                async with self._session(request, done, chain) as session:
                    while True:
                        token = await self._next(session, position=len(request.prompt) + len(done))
                        done.append(token.token)
                        yield Generated(token.token, chain, token.final)
                        if token.final:
                            return
            except _StageLostError as error:
                log.warning("session_rerouted", reason=str(error), tokens=len(done))
                problem = error
                excluded |= error.peers
                await asyncio.sleep(self._rng.uniform(0, BACK_OFF_S))
        raise SessionError(f"gave up after {ATTEMPTS} chains: {problem}")

    def _check(self, request: Generation) -> None:
        if not request.prompt:
            raise RequestError("the prompt is empty")
        if len(request.prompt) >= self._context:
            raise ContextLengthError(
                f"the prompt has {len(request.prompt)} tokens; the model takes {self._context - 1} at most"
            )
        if request.max_tokens < 1 or len(request.prompt) + request.max_tokens > self._context:
            raise ContextLengthError(
                f"{len(request.prompt)} prompt tokens and {request.max_tokens} new ones are more than "
                f"the model's {self._context}: lower max_tokens"
            )

    @asynccontextmanager
    async def _session(
        self, request: Generation, done: Sequence[int], chain: Chain
    ) -> AsyncIterator[_Session]:
        """Open the chain, feed the prompt (and what was generated before), renew the lease; close on the way
        out.
        """
        known = (*request.prompt, *done)
        session = _Session(secrets.token_hex(16), chain, asyncio.Queue(request.max_tokens - len(done) + 1))
        self._sessions[session.id] = session
        renewal = asyncio.create_task(self._renew(session))
        try:
            await self._open(session, request, known)
            for start in range(0, len(known), CHUNK):
                chunk = known[start : start + CHUNK]
                self._tell(session, 0, Tokens(session.id, 0, start, chunk, start + CHUNK >= len(known)))
            yield session
        finally:
            renewal.cancel()
            await asyncio.wait({renewal})
            del self._sessions[session.id]
            for peer in session.peers:
                with suppress(LinkError):  # then its lease ends by itself
                    self._send(peer, Close(session.id))

    async def _open(self, session: _Session, request: Generation, known: tuple[int, ...]) -> None:
        stages = tuple((stage.peer, stage.start, stage.end) for stage in session.chain.stages)
        await self._reach(sorted(session.peers))
        for index in range(len(stages)):
            plan = Open(
                session=session.id,
                stage=index,
                stages=stages,
                entry=self._own,
                reserve=min(len(known) + RESERVE_AHEAD, len(request.prompt) + request.max_tokens),
                temperature=request.sampling.temperature,
                top_p=request.sampling.top_p,
                top_k=request.sampling.top_k,
                seed=request.sampling.seed,
                eos=tuple(sorted(self._eos)),
                limit=len(request.prompt) + request.max_tokens - 1,
                lease_s=LEASE_S,
            )
            self._tell(session, index, plan)
        try:
            async with asyncio.timeout(OPEN_DEADLINE_S):
                await session.answered.wait()
        except TimeoutError:
            silent = frozenset(
                peer for index, (peer, _, _) in enumerate(stages) if index not in session.answers
            )
            raise _StageLostError(
                silent, f"no answer from {', '.join(peer[:8] for peer in silent)}"
            ) from None
        if session.lost is not None:
            raise session.lost
        for answer in session.answers.values():
            if not answer.ok:
                peer = stages[answer.stage][0]
                raise _StageLostError(frozenset({peer}), f"{peer[:8]} refused: {answer.reason}", busy=True)

    async def _reach(self, peers: Sequence[PeerId]) -> None:
        """Bring up the links to all of them at once."""

        async def problem(peer: PeerId) -> str:
            try:
                await self._connect(peer)
            except LinkError as error:
                return str(error)
            return ""

        problems = dict(zip(peers, await asyncio.gather(*map(problem, peers)), strict=True))
        unreached = frozenset(peer for peer in peers if problems[peer])
        if unreached:
            raise _StageLostError(unreached, "; ".join(filter(None, problems.values())))

    def _tell(self, session: _Session, stage: int, message: Message) -> None:
        peer = session.chain.stages[stage].peer
        try:
            self._send(peer, message)
        except LinkError as error:
            raise _StageLostError(frozenset({peer}), f"peer {peer[:8]}: {error}") from error

    async def _renew(self, session: _Session) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            for peer in session.peers:
                try:
                    self._send(peer, Renew(session.id))
                except LinkError as error:
                    session.lose(_StageLostError(frozenset({peer}), f"peer {peer[:8]}: {error}"))

    async def _next(self, session: _Session, position: int) -> Token:
        """The token at ``position``. Silence alone is not death: slow peers still answer pings."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + TOKEN_DEADLINE_S
        while True:
            if session.lost is not None and session.tokens.empty():
                raise session.lost
            try:
                async with asyncio.timeout(SILENCE_S):
                    token = await session.tokens.get()
            except TimeoutError:
                silent = await self._silent(session)
                if silent:
                    reason = f"no sign of life from {', '.join(peer[:8] for peer in silent)}"
                    raise _StageLostError(silent, reason) from None
                if loop.time() > deadline:
                    raise _StageLostError(session.peers, f"no token in {TOKEN_DEADLINE_S:.0f} s") from None
                continue
            if isinstance(token, _StageLostError):
                raise token
            if token.position != position or token.token >= self._vocabulary:
                sender = session.chain.stages[-1].peer
                raise _StageLostError(frozenset({sender}), f"{sender[:8]} sent a token that cannot be")
            return token

    async def _silent(self, session: _Session) -> frozenset[PeerId]:
        async def silent(peer: PeerId) -> bool:
            try:
                await self._ping(peer)
            except LinkError:
                return True
            return False

        peers = sorted(session.peers - {self._own})
        gone = await asyncio.gather(*map(silent, peers))
        return frozenset(peer for peer, is_gone in zip(peers, gone, strict=True) if is_gone)


def _final_error(error: NoRouteError, problem: _StageLostError | None) -> NoRouteError | BusyError:
    """Without any chain left, the first cause tells the client more than the last symptom."""
    if problem is None:
        return error
    if problem.busy:
        return BusyError(f"every chain is busy ({problem}): try again shortly")
    return NoRouteError(error.missing, f"{error} ({problem})")
