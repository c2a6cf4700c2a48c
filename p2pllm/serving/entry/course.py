"""How a request finds its way: the first chain, and another one whenever something befalls the last.

What can stay stays. Who failed is avoided for a moment, for it may come back; without any way the request
waits for one, but never long.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import structlog

from p2pllm.errors import BusyError, NoRouteError, SessionError
from p2pllm.execution import blocks_for
from p2pllm.scheduling import Chain
from p2pllm.serving.entry.affinity import Kept
from p2pllm.serving.entry.opening import RESERVE_AHEAD
from p2pllm.serving.entry.rerouting import survivors
from p2pllm.serving.entry.router import Router
from p2pllm.serving.entry.session import Session
from p2pllm.serving.entry.trouble import StageLostError, Trouble

__all__ = ["Course"]

HEAL_S = 5.0
"""How long a session that was lost somewhere waits for a way on, between two tokens."""

BUSY_S = 0.3
"""How long a request tries to get in where all is taken."""

ATTEMPTS = 16
"""Chains in a row that may fail without a token."""

HAND_OVER_S = 1.0
"""How often to look for somebody in the place of a peer that leaves."""

PARDON_S = 10.0
"""How long a straggler stays when there is nobody better."""

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.02, 0.25

log = structlog.get_logger()


class Course:
    """Keeps one session on a chain."""

    def __init__(self, session: Session, router: Router, kept: Kept, rng: random.Random) -> None:
        """``kept`` is who may still hold the beginning of the session's text."""
        self.reroutes = 0
        self.recomputed = 0
        """Layer-tokens that were computed more than once."""
        self._session = session
        self._router = router
        self._kept = kept
        self._rng = rng
        self._trouble = Trouble()
        self._token_s = self._now()
        self._attempts = 0
        self._waited_s = 0.0
        self._lost_s: float | None = None
        """Since when there has been no chain, after something had failed; None while there is one."""
        self._untold: dict[str, object] = {}
        self._handing_over: asyncio.Task[tuple[Chain, int]] | None = None

    async def aclose(self) -> None:
        """Leave no task."""
        if self._handing_over is not None:
            self._handing_over.cancel()
            await asyncio.wait({self._handing_over})
            self._handing_over = None

    async def begin(self) -> None:
        """Open the first chain.

        Raises NoRouteError (layers without a holder), BusyError (no KV cache anywhere), SessionError.
        """
        await self._establish()

    async def go_on(self, problem: StageLostError) -> None:
        """Find another chain because of this, or leave all as it is if that is better. Raises as `begin`."""
        problems = [problem, *self._session.pending.all()]
        for each in problems:
            self._meet(each)
        working = {stage.peer for stage in self._session.chain.stages}
        problems = [each for each in problems if each.hop is not None or each.peers & working]
        recomputed = self.recomputed
        if any(each.cause in ("lost", "busy", "cut") for each in problems):
            await self.aclose()
            await self._establish()
        elif not (problems and await self._hand_over(problems)):
            return  # the chain goes on
        self.reroutes += 1
        self._untold = {
            "generation": self._session.generation,
            "reason": str(problem),
            "recomputed": self.recomputed - recomputed,
        }

    def token(self) -> None:
        """A token has come: all is well."""
        now = self._now()
        if self._untold:
            session = self._session
            log.info(
                "session_rerouted",
                session=session.id[:8],
                tokens=session.transcript.count,
                **self._untold,
                pause_s=round(now - self._token_s, 3),
            )
            self._untold = {}
        self._token_s = now
        self._attempts, self._waited_s = 0, 0.0
        self._trouble.calm()

    async def _hand_over(self, problems: Sequence[StageLostError]) -> bool:
        """Have others take over from peers that still work, once these have what it takes; True if they
        have.
        """
        task = self._handing_over
        if task is None:
            chain = self._better(problems[0])
            if chain is not None:
                if problems[0].cause == "slow":
                    self._router.blame(problems[0].peers)
                self._handing_over = task = asyncio.create_task(self._prepare(chain))
                task.add_done_callback(partial(self._come_back, problems[0]))
                return False
        elif not task.done():
            return False
        else:
            self._handing_over = None
            if not isinstance(task.exception(), StageLostError):
                chain, recomputed = task.result()
                self.recomputed += recomputed
                await self._establish(chain)
                return True
        for each in problems:
            self._trouble.forgive(each.cause)
            self._session.put_off(each, PARDON_S if each.cause == "slow" else HAND_OVER_S)
        return False

    async def _prepare(self, chain: Chain) -> tuple[Chain, int]:
        return chain, await self._session.fill(chain)

    def _come_back(self, problem: StageLostError, preparing: asyncio.Task[tuple[Chain, int]]) -> None:
        """Others are ready, or cannot be; unless somebody was lost meanwhile and the chain is another."""
        if not preparing.cancelled():
            self._session.lose(problem)

    async def _establish(self, ready: Chain | None = None) -> None:
        """Open chain after chain, the one that is ``ready`` first, until one can be had."""
        session = self._session
        while self._attempts < ATTEMPTS:
            self._attempts += 1
            if self._trouble.last is not None and self._lost_s is None:
                self._lost_s = self._now()
            chain, ready = ready or await self._way_on(), None
            work_s = self._router.work_s(chain)
            try:
                self.recomputed += await session.establish(chain, work_s)
            except StageLostError as problem:
                for each in (problem, *session.pending.all()):
                    self._meet(each)
            else:
                if self._lost_s is not None:
                    self._waited_s += self._now() - self._lost_s
                    self._lost_s = None
                return
        raise self._final(SessionError(f"gave up after {ATTEMPTS} chains: {self._trouble.last}"))

    def _meet(self, problem: StageLostError) -> None:
        """Learn from what has happened, and let go of what cannot be used any more."""
        now = self._now()
        problem = self._trouble.note(problem, now)
        session = self._session
        log.info("stage_lost", session=session.id[:8], cause=problem.cause, reason=str(problem))
        if problem.cause == "busy" and not session.transcript.count:
            session.let_go()
        elif problem.cause in ("lost", "busy"):
            session.let_go(peers=problem.peers)
        if problem.cause == "lost":
            self._router.blame(problem.peers)

    async def _way_on(self) -> Chain:
        """The next chain to try, when there is one."""
        pause = _FIRST_PAUSE_S
        while True:
            try:
                return self._route()
            except NoRouteError as error:
                if not self._may_wait():
                    raise self._final(error) from error
            if not self._session.transcript.count:
                self._session.let_go()  # others may wait for just that
            await asyncio.sleep(self._rng.uniform(pause / 2, pause))
            for cause in ("busy", "slow", "leaving"):
                self._trouble.forgive(cause)
            pause = min(2 * pause, _MAX_PAUSE_S)

    def _route(self) -> Chain:
        """The best chain that keeps as much as can be."""
        now, session = self._now(), self._session
        remaining = session.request.max_tokens - session.transcript.count
        tokens = len(session.transcript.known) + min(remaining, RESERVE_AHEAD)
        find = partial(
            self._router.chain,
            expected_tokens=max(1, remaining),
            kv_blocks=blocks_for(tokens),
            excluded=self._trouble.avoided(now),
            severed=self._trouble.severed(now),
        )
        stages = [stage for stage in session.chain.stages if stage in session.seats]
        staying = survivors(
            stages,
            lost=self._trouble.avoided(now),
            complaints=self._trouble.complaints(now),
            newcomers=session.newcomers,
        )
        if staying:
            with suppress(NoRouteError):
                return find(fixed=staying)
        return find(kept=self._kept)

    def _better(self, problem: StageLostError) -> Chain | None:
        """A way without a peer that still works, if there is one."""
        try:
            chain = self._route()
        except NoRouteError:
            return None
        is_better = problem.cause == "leaving" or 2 * chain.latency_s < self._session.interval_s
        return chain if is_better and self._session.transcript.count else None

    def _may_wait(self) -> bool:
        """Whether there may still be a way soon; without a first one it is better to wait in the queue."""
        trouble = self._trouble.last
        if trouble is None or self._lost_s is None:
            return False
        is_only_busy = trouble.cause == "busy" and not self._session.transcript.count
        waited_s = self._waited_s + self._now() - self._lost_s
        return waited_s < (BUSY_S if is_only_busy else HEAL_S)

    def _final(self, error: NoRouteError | SessionError) -> NoRouteError | BusyError | SessionError:
        """Without any way left, the first cause tells the client more than the last symptom."""
        trouble = self._trouble.last
        if trouble is None:
            return error
        if trouble.cause == "busy":
            return BusyError(f"every chain is busy ({trouble}): try again shortly")
        if isinstance(error, NoRouteError):
            return NoRouteError(error.missing, f"{error} ({trouble})")
        return error

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
