"""The entry side of requests: from a prompt of token ids to a stream of token ids.

One request may need several sessions: when a peer of the chain is lost or refuses, the entry takes another
chain and goes on behind the last token it received. Sampling depends only on (tokens so far, parameters,
seed, position), so the client sees a pause and no token changed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import structlog

from p2pllm.errors import BusyError, ContextLengthError, NoRouteError, RequestError, SessionError
from p2pllm.execution import BLOCK_TOKENS
from p2pllm.scheduling import Chain, PeerId
from p2pllm.serving.router import Router
from p2pllm.serving.session import RESERVE_AHEAD, Generation, Network, Session, StageLostError
from p2pllm.transport import Failed, Opened, Token

__all__ = ["Generated", "Generation", "Generator"]

ATTEMPTS = 16
"""Chains one request may try before the client gets an error; most failures show within milliseconds."""

BACK_OFF_S = 0.05

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Generated:
    """One token, the chain that made it, and why it is the last ("stop", "length") or ""."""

    token: int
    chain: Chain
    final: str


class Generator:
    """Runs requests as the entry. Frames for its sessions arrive through ``receive``."""

    def __init__(self, *, router: Router, network: Network, context: int, rng: random.Random) -> None:
        """``context``: the most tokens, prompt and answer together, that a session may have."""
        self.context = context
        self._router = router
        self._network = network
        self._rng = rng
        self._sessions: dict[str, Session] = {}

    def receive(self, sender: PeerId, message: Opened | Token | Failed) -> None:
        """Hand a frame to its session; frames of unknown sessions are dropped."""
        session = self._sessions.get(message.session)
        if session is not None:
            session.receive(sender, message)

    def peer_down(self, peer: PeerId) -> None:
        """The link to ``peer`` is gone: every session through it is lost."""
        for session in self._sessions.values():
            if peer in session.peers:
                session.lose(StageLostError(frozenset({peer}), f"peer {peer[:8]} is gone"))

    async def generate(self, request: Generation) -> AsyncGenerator[Generated]:
        """Yield the tokens of one request as they arrive; closing the generator frees the chain everywhere.

        Raises: RequestError (can never succeed), NoRouteError (layers without a holder), BusyError (no KV
        cache anywhere), SessionError (broke off; what was yielded stands).
        """
        self._check(request)
        done: list[int] = []
        excluded: frozenset[PeerId] = frozenset()
        severed: frozenset[tuple[PeerId, PeerId]] = frozenset()
        problem: StageLostError | None = None
        for _ in range(ATTEMPTS):
            try:
                chain = self._chain(request, len(done), excluded, severed)
            except NoRouteError as error:
                raise _final_error(error, problem) from error
            session = Session(chain, request, (*request.prompt, *done), self._network)
            self._sessions[session.id] = session
            try:
                async with session.opened():
                    while True:
                        token = await session.next(len(request.prompt) + len(done))
                        done.append(token.token)
                        yield Generated(token.token, chain, token.final)
                        if token.final:
                            self._router.trust(session.peers)
                            return
            except StageLostError as error:
                log.warning("session_rerouted", session=session.id[:8], reason=str(error), tokens=len(done))
                problem = error
                excluded |= error.peers
                severed |= {error.hop} if error.hop is not None else set()
                if not error.busy:
                    self._router.blame(error.peers - {self._network.own})
            finally:
                del self._sessions[session.id]
            await asyncio.sleep(self._rng.uniform(0, BACK_OFF_S))
        if problem is not None and problem.busy:
            raise BusyError(f"every chain is busy ({problem}): try again shortly")
        raise SessionError(f"gave up after {ATTEMPTS} chains: {problem}")

    def _check(self, request: Generation) -> None:
        if not request.prompt:
            raise RequestError("the prompt is empty")
        prompt = len(request.prompt)
        if prompt >= self.context:
            raise ContextLengthError(
                f"the prompt has {prompt} tokens; the model takes {self.context - 1} at most"
            )
        if request.max_tokens < 1 or prompt + request.max_tokens > self.context:
            raise ContextLengthError(
                f"{prompt} prompt tokens and {request.max_tokens} new ones are more than the model's "
                f"{self.context}: lower max_tokens"
            )

    def _chain(
        self,
        request: Generation,
        done: int,
        excluded: frozenset[PeerId],
        severed: frozenset[tuple[PeerId, PeerId]],
    ) -> Chain:
        remaining = request.max_tokens - done
        tokens = len(request.prompt) + done + min(remaining, RESERVE_AHEAD)
        return self._router.chain(
            expected_tokens=remaining,
            kv_blocks=-(-tokens // BLOCK_TOKENS),
            excluded=excluded,
            severed=severed,
        )


def _final_error(error: NoRouteError, problem: StageLostError | None) -> NoRouteError | BusyError:
    """Without any chain left, the first cause tells the client more than the last symptom."""
    if problem is None:
        return error
    if problem.busy:
        return BusyError(f"every chain is busy ({problem}): try again shortly")
    return NoRouteError(error.missing, f"{error} ({problem})")
