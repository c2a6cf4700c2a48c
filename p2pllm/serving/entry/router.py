"""Which chain a request takes: Phase 2 over the live view, away from peers that have just failed us."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from p2pllm.errors import NoRouteError
from p2pllm.scheduling import STALE_S, Chain, Choices, PeerId, Routes, Stage
from p2pllm.serving.entry.affinity import NOWHERE, Kept
from p2pllm.swarm import GONE_S, UNMEASURED, BackOff, Latencies, View

__all__ = ["Router"]

BAN_S = GONE_S
"""How long a peer is avoided after its first failure: until its record is gone, if it is dead. Doubled with
each further one.
"""

MAX_BAN_S = 120.0

EFFORT = 2**24
"""Numbers that a search may go through, some 50 ms: it holds up the event loop, and strangers choose ρ."""


class Router:
    """Answers from the view and its own memory alone; never waits for the network."""

    def __init__(
        self,
        *,
        view: View,
        layers: int,
        own: PeerId,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._view = view
        self._own = own
        self._rng = rng
        self._clock = clock
        self._bans = BackOff(BAN_S, MAX_BAN_S)
        self._choices = Choices()
        self._routes = Routes(layers, UNMEASURED)
        self._latencies = Latencies(self._routes.mesh)
        self._version = 0  # of the view, as far as the routes know it
        self._followed: dict[PeerId, None] = {}  # the peers that the routes know, longest silent first

    def chain(
        self,
        *,
        expected_tokens: int,
        kv_blocks: int = 0,
        excluded: frozenset[PeerId] = frozenset(),
        severed: frozenset[tuple[PeerId, PeerId]] = frozenset(),
        fixed: Sequence[Stage] = (),
        kept: Kept = NOWHERE,
        preview: bool = False,
    ) -> Chain:
        """The cheapest chain for one request, without ``excluded`` peers and ``severed`` hops (from, to).

        ``fixed`` stages stay, and only what is between them is sought. Those that have ``kept`` the beginning
        of the text are taken if they can be used and hardly anybody is better. Unless this is a ``preview``
        that nobody will use, the chain's peers count as busier from now on. Raises NoRouteError with the
        layers that nobody serves.

        Peers whose records are late, and those that failed lately, are avoided; but a doubtful chain is
        better than none.
        """
        now = self._clock()
        self.follow()
        find = partial(
            self._routes.find,
            entry=self._own,
            expected_tokens=expected_tokens,
            kv_blocks=kv_blocks,
            severed=severed,
            fixed=fixed,
            waits=self._choices.waits(now),
            now=now,
            rng=self._rng,
            effort=EFFORT,
        )
        doubtful = excluded | self._bans.paused(now)
        try:
            chain = find(excluded=doubtful, stale_s=STALE_S)
        except NoRouteError:
            chain = find(excluded=excluded, stale_s=GONE_S)
        if kept.stages and kept.stages != chain.stages:
            others = self._followed.keys() - {stage.peer for stage in kept.stages}
            with suppress(NoRouteError):
                there = find(excluded=doubtful | others, stale_s=STALE_S)
                is_worth = kept.is_worth(there.latency_s, chain.latency_s, expected_tokens)
                chain = there if there.stages == kept.stages and is_worth else chain
        if not preview:
            self._choices.add(self._routes.work_s(chain), now)
        return chain

    def work_s(self, chain: Chain) -> Mapping[PeerId, float]:
        """How long (s) a token of ``chain`` keeps each of its peers at work, as they say, waits left out."""
        return self._routes.work_s(chain)

    def follow(self) -> None:
        """Tell the routes what has changed in the view. Called after each batch of records, it leaves `chain`
        little to catch up with.
        """
        now = self._clock()
        self._view.expire(now)
        self._version, news = self._view.news(self._version)
        for peer in reversed(news):
            self._followed.pop(peer, None)
            state = self._view.peer(peer, now)
            if state is None:
                self._drop(peer)
                continue
            self._followed[peer] = None
            self._latencies.put(state)
            self._routes.put(peer, state.holders())
            self._choices.heard(peer, state.heard_s)
        # The view forgets who left long ago, and does not tell a reader who comes seldom.
        while self._followed and self._view.peer(peer := next(iter(self._followed)), now) is None:
            del self._followed[peer]
            self._drop(peer)

    def _drop(self, peer: PeerId) -> None:
        self._latencies.drop(peer)
        self._routes.drop(peer)

    def blame(self, peers: Iterable[PeerId]) -> None:
        """These peers failed a session: avoid them, the longer the more often."""
        now = self._clock()
        # One that failed many sessions at once, or is used for want of a better one, has failed once.
        for peer in frozenset(peers) - self._bans.paused(now) - {self._own}:
            self._bans.failed(peer, now)

    def trust(self, peers: Iterable[PeerId]) -> None:
        """These peers served a session to its end."""
        for peer in peers:
            self._bans.worked(peer)
