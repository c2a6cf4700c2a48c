"""What can happen to a session on its way, and what its request has learned of it. Pure."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable
from typing import Literal

from p2pllm.scheduling import PeerId
from p2pllm.serving.entry.rerouting import Hop
from p2pllm.transport import Failed

__all__ = ["Cause", "Pending", "StageLostError", "Trouble", "problem_of"]

Cause = Literal["lost", "busy", "cut", "slow", "leaving"]

_AVOIDED_S: dict[Cause, float] = {"lost": 1.0, "busy": 1.0, "cut": 0.0, "slow": 60.0, "leaving": 600.0}
"""How long a request avoids a peer at all costs; a little longer its entry does where it has a choice."""

_SEVERED_S = 1.0
_LIAR_HOPS = 2
"""Who complains more often, and nothing else is wrong with its neighbours, is itself the problem."""


class StageLostError(Exception):
    """The session cannot go on as it is: routes should do without ``peers``.

    They are gone, or "busy": they live, but refused; "slow" and "leaving" ones still work. ``hop`` is who
    complains, and of whom, when only the way between two stages is broken; it may be tried again at once if
    it was "cut".
    """

    def __init__(
        self, peers: Iterable[PeerId], reason: str, *, cause: Cause = "lost", hop: Hop | None = None
    ) -> None:
        super().__init__(reason)
        self.peers = frozenset(peers)
        self.cause: Cause = cause
        self.hop = hop


def problem_of(failed: Failed, peer: PeerId, neighbours: Collection[PeerId]) -> StageLostError:
    """What a stage on ``peer`` says of itself or, if it is one of its ``neighbours``, of another."""
    reason = f"{peer[:8]}: {failed.reason}"
    match failed.cause:
        case "cut" | "unreached" if failed.peer in neighbours:
            cause: Cause = "cut" if failed.cause == "cut" else "lost"
            return StageLostError((), f"{reason} ({failed.peer[:8]})", cause=cause, hop=(peer, failed.peer))
        case "leaving":
            return StageLostError({peer}, reason, cause="leaving")
        case "busy":
            return StageLostError({peer}, f"{peer[:8]} refused: {failed.reason}", cause="busy")
        case _:
            return StageLostError({peer}, reason)


class Pending:
    """What has happened to one chain and is still to be dealt with. Times are in seconds."""

    def __init__(self) -> None:
        self._problems: deque[StageLostError] = deque()
        self._put_off: list[tuple[float, StageLostError]] = []

    def __bool__(self) -> bool:
        """Whether there is anything to deal with now."""
        return bool(self._problems)

    def add(self, problem: StageLostError) -> None:
        """Something has happened."""
        self._problems.append(problem)

    def first(self) -> StageLostError:
        """Take out the first of all."""
        return self._problems.popleft()

    def all(self) -> list[StageLostError]:
        """Take out all of them."""
        found = list(self._problems)
        self._problems.clear()
        return found

    def put_off(self, problem: StageLostError, until: float) -> None:
        """Nothing can be done about this before then."""
        self._put_off.append((until, problem))

    def look(self, now: float) -> float:
        """Bring back what was put off until now; returns when there will be more."""
        self._problems.extend(problem for until, problem in self._put_off if until <= now)
        self._put_off = [it for it in self._put_off if it[0] > now]
        return min((until for until, _ in self._put_off), default=math.inf)

    def begin(self) -> None:
        """The chain is another one: what was put off of the last does not matter any more."""
        self._put_off.clear()


class Trouble:
    """What one request knows of peers and hops that failed it. Times are in seconds."""

    def __init__(self) -> None:
        self.last: StageLostError | None = None
        self._avoided: dict[PeerId, tuple[Cause, float]] = {}
        self._accused: dict[Hop, float] = {}
        self._complaints: Counter[PeerId] = Counter()

    def note(self, problem: StageLostError, now: float) -> StageLostError:
        """Learn from ``problem``; returns what it is taken for."""
        if problem.hop is not None and problem.hop[1] not in self.avoided(now):
            source, target = problem.hop
            self._complaints[source] += 1
            if self._complaints[source] > _LIAR_HOPS:
                problem = StageLostError({source}, str(problem))
            elif problem.cause == "lost":
                self._accused[source, target] = now + _SEVERED_S
        # Whoever cannot reach a peer that is gone has said nothing of the way to it.
        self._accused = {hop: until for hop, until in self._accused.items() if hop[1] not in problem.peers}
        for peer in problem.peers:
            self._avoided[peer] = problem.cause, now + _AVOIDED_S[problem.cause]
        self.last = problem
        return problem

    def calm(self) -> None:
        """The session goes on: complaints from before prove nothing any more."""
        self._complaints.clear()

    def avoided(self, now: float) -> frozenset[PeerId]:
        """Peers to do without for now."""
        return frozenset(peer for peer, (_, until) in self._avoided.items() if now < until)

    def complaints(self, now: float) -> frozenset[Hop]:
        """Who has complained lately that it cannot reach whom."""
        return frozenset(hop for hop, until in self._accused.items() if now < until)

    def severed(self, now: float) -> frozenset[Hop]:
        """Hops to do without for now, in both directions."""
        complaints = self.complaints(now)
        return complaints | {(target, source) for source, target in complaints}

    def forgive(self, cause: Cause) -> None:
        """Avoid those no more whose trouble was this one: there is no way without them."""
        self._avoided = {peer: it for peer, it in self._avoided.items() if it[0] != cause}
