"""The entry side of requests: from a prompt of token ids to a stream of token ids.

One request is one session, whatever happens to its chains. Sampling depends only on (tokens so far,
parameters, seed, position), so when a peer is lost the client sees a pause and no token changed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from p2pllm.errors import ContextLengthError, RequestError
from p2pllm.scheduling import Chain, PeerId
from p2pllm.serving.entry.affinity import Affinity
from p2pllm.serving.entry.course import Course
from p2pllm.serving.entry.prefix import prefix_names
from p2pllm.serving.entry.request import Generation, Network
from p2pllm.serving.entry.router import Router
from p2pllm.serving.entry.session import Session
from p2pllm.serving.entry.trouble import StageLostError
from p2pllm.transport import Failed, Opened, Token

__all__ = ["Generated", "Generation", "Generator"]


@dataclass(frozen=True, slots=True)
class Generated:
    """One token, the chain that made it, and why it is the last ("stop", "length") or "".

    ``cached`` tokens of the prompt had been kept by all stages since an earlier session.
    """

    token: int
    chain: Chain
    final: str
    cached: int = 0


class Generator:
    """Runs requests as the entry. Frames for its sessions arrive through ``receive``."""

    def __init__(self, *, router: Router, network: Network, context: int, rng: random.Random) -> None:
        """``context``: the most tokens, prompt and answer together, that a session may have."""
        self.context = context
        self.prompt_tokens = 0
        """Of all sessions that had a chain."""
        self.cached_tokens = 0
        """Those of them that no stage had to read once more."""
        self.reroutes = 0
        """How often a session has gone on on another chain."""
        self.recomputed_layer_tokens = 0
        """What that made stages compute once more: tokens times layers."""
        self._router = router
        self._network = network
        self._rng = rng
        self._affinity = Affinity()
        self._sessions: dict[str, Session] = {}

    def receive(self, sender: PeerId, message: Opened | Token | Failed) -> None:
        """Hand a frame to its session; frames of unknown sessions are dropped."""
        session = self._sessions.get(message.session)
        if session is not None:
            session.receive(sender, message)

    def peer_down(self, peer: PeerId) -> None:
        """The link to ``peer`` is gone; whether the stages on it are remains to be seen."""
        cut = StageLostError(
            (), f"the link to peer {peer[:8]} broke", cause="cut", hop=(peer, self._network.own)
        )
        for session in self._sessions.values():
            if session.uses(peer):
                session.lose(cut)

    async def generate(self, request: Generation) -> AsyncGenerator[Generated]:
        """Yield the tokens of one request as they arrive; closing the generator frees the chain everywhere.

        A request that has had a chain waits at most 5 s for a way on.

        Raises: RequestError (can never succeed), NoRouteError (layers without a holder), BusyError (no KV
        cache anywhere), SessionError (broke off); what was yielded stands.
        """
        self._check(request)
        session = Session(request, self._network)
        clock = asyncio.get_running_loop().time
        kept = self._affinity.recall(prefix_names(request.prompt, self._network.secret), clock())
        course = Course(session, self._router, kept, self._rng)
        self._sessions[session.id] = session
        try:
            async with session.opened(), aclosing(course):
                await course.begin()
                self.prompt_tokens += len(request.prompt)
                self.cached_tokens += session.cached
                while True:
                    try:
                        token = await session.next()
                    except StageLostError as problem:
                        await course.go_on(problem)
                        continue
                    course.token()
                    yield Generated(token.token, session.chain, token.final, session.cached)
                    if token.final:
                        self._router.trust({stage.peer for stage in session.chain.stages})
                        return
        finally:
            del self._sessions[session.id]
            self._affinity.note(session.kept, len(request.prompt), session.chain.stages, clock())
            self.reroutes += course.reroutes
            self.recomputed_layer_tokens += course.recomputed

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
