"""A seat: what a peer keeps about one stage of one session."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from p2pllm.scheduling import PeerId
from p2pllm.transport import Hidden, Open, Token, Tokens

__all__ = ["Seat", "StageWork"]

StageWork = Tokens | Hidden | Token

INBOX = 8192
"""Frames that may wait for one seat: more prefill chunks than the longest contexts have."""


@dataclass(slots=True, eq=False)
class Seat:
    """This peer's part of one chain, as ``entry`` asked for it in ``plan``."""

    entry: PeerId
    plan: Open
    inbox: asyncio.Queue[StageWork] = field(default_factory=lambda: asyncio.Queue(INBOX))
    lease: asyncio.Timeout | None = None
    task: asyncio.Task[None] | None = None
    kept: bytes = b""
    """Names of the blocks that stay behind for later sessions of the same entry."""

    @property
    def key(self) -> tuple[str, int]:
        """The session and the place in its chain."""
        return self.plan.session, self.plan.stage

    @property
    def owner(self) -> str:
        """Who may use what stays behind: the entry, with hidden states that are rounded in the same way."""
        return f"{self.entry}:{self.plan.upstream.hex()}"

    @property
    def last(self) -> bool:
        """Whether this stage samples."""
        return self.plan.stage == len(self.plan.stages) - 1

    @property
    def next_peer(self) -> PeerId:
        """Around the ring: after the last stage comes the first."""
        return self.plan.stages[(self.plan.stage + 1) % len(self.plan.stages)][0]

    @property
    def previous_peer(self) -> PeerId:
        """Around the ring: before the first stage comes the last."""
        return self.plan.stages[self.plan.stage - 1][0]

    def accepts(self, sender: PeerId, work: StageWork) -> bool:
        """Whether ``sender`` is the one peer that may send this kind of work to this stage."""
        match work:
            case Tokens():
                return self.plan.stage == 0 and sender == self.entry
            case Token():
                return self.plan.stage == 0 and sender == self.previous_peer
            case Hidden():
                return self.plan.stage > 0 and sender == self.previous_peer
