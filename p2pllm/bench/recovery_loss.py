"""The loss of one stage in the middle of an answer: finds out who is in the chain, and strikes when it is
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from p2pllm.bench.recovery_swarm import HeldTwice, Host, view_of

__all__ = ["ROLES", "Loss", "covers", "in_role"]

ROLES: Final = ("first", "middle", "last")


class Loss:
    """Takes the stage of ``role`` from a chain of ``entry`` when ``after`` pieces of the answer have come.

    What it did: ``victim`` (None: nothing yet), ``chain`` (how many stages there were), and ``struck``, the
    pieces that had come by then.
    """

    def __init__(self, swarm: HeldTwice, entry: Host, role: str, *, frozen: bool, after: int) -> None:
        self.victim: Host | None = None
        self.chain = 0
        self.struck = 0
        self._swarm = swarm
        self._entry = entry
        self._role = role
        self._frozen = frozen
        self._after = after
        self._target: Host | None = None

    async def hear(self, pieces: int) -> bool:
        """So many pieces have come. False if there is nothing to wait for: the chain has no such stage, or
        it is the entry itself.
        """
        if self.victim is not None:
            return True
        if self._target is None:
            chain = self._swarm.busy(await view_of(self._entry.url))
            if not covers([host.layers for host in chain], self._swarm.layers):
                return True  # not all of it is to be seen yet
            self.chain = len(chain)
            self._target = in_role(chain, self._role)
            if self._target in (None, self._entry):
                return False
        if pieces >= self._after:
            self.victim, self.struck = self._target, pieces
            await (self._target.freeze() if self._frozen else self._target.kill())
        return True


def covers(parts: Sequence[range], layers: int) -> bool:
    """Whether these, ordered by where they begin, hold all of so many layers."""
    reached = 0
    for part in parts:
        reached = max(reached, part.stop) if part.start <= reached else reached
    return reached == layers


def in_role(chain: Sequence[Host], role: str) -> Host | None:
    """The first peer of a chain, the last, or one between them; None if there is none."""
    places = dict(zip(ROLES, (chain[:1], chain[1:-1], chain[1:][-1:]), strict=True))
    return next(iter(places[role]), None)
