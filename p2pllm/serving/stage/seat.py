"""A seat: what a peer keeps about one stage of one session."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from p2pllm.scheduling import PeerId
from p2pllm.serving.stage.rounding import Rounding
from p2pllm.transport import Hidden, Open, Reroute, Token, Tokens

__all__ = ["ORPHANED_S", "RESERVED_S", "Seat", "StageWork", "size_of"]

StageWork = Tokens | Hidden | Token

RESERVED_S = 5.0
"""How long a reservation lasts until the session has begun: its entry may have crashed."""

ORPHANED_S = 2.0
"""How long a seat waits for an entry whose link broke: it may have crashed, or be back at once."""

_INBOX = 8192
"""Frames that may wait for one seat: more prefill chunks than the longest contexts have."""


@dataclass(slots=True, eq=False)
class Seat:
    """This peer's part of one chain, as ``entry`` asked for it in ``plan``.

    Seats are known by their first layer: it stays when a re-route changes their place in the chain. ``until``
    is when the seat ends by itself, on the clock of the event loop.
    """

    plan: Open
    until: float
    held: int = 0
    """Tokens that it began its chain with."""
    position: int = 0
    """Tokens that it has run by now."""
    forward_from: int = 0
    inbox: asyncio.Queue[StageWork] = field(default_factory=lambda: asyncio.Queue(_INBOX))
    waiting_bytes: int = 0
    rounding: Rounding = field(default_factory=Rounding)
    resumed: asyncio.Event = field(default_factory=asyncio.Event)
    has_begun: bool = False
    is_handed_over: bool = False
    """Whether the entry was told that the next chain should do without it."""
    task: asyncio.Task[None] | None = None
    errand: asyncio.Task[None] | None = None
    """What it sends again to a stage of the next chain."""
    step_s: float = 0.0
    step_began: float | None = None

    @property
    def entry(self) -> PeerId:
        """Whose session it is."""
        return self.plan.entry

    @property
    def key(self) -> tuple[str, int]:
        """The session and the first layer."""
        return self.plan.session, self.layers.start

    @property
    def layers(self) -> range:
        """Those that it runs."""
        _, start, end = self.plan.stages[self.plan.stage]
        return range(start, end)

    @property
    def address(self) -> tuple[str, int, int]:
        """The session, the place in its chain, and which chain, as frames to and from here begin."""
        return self.plan.session, self.plan.stage, self.plan.generation

    @property
    def next_address(self) -> tuple[str, int, int]:
        """How frames to the next stage begin."""
        return self.plan.session, self.plan.stage + 1, self.plan.generation

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

    def objection(self, sender: PeerId, own: PeerId) -> str:
        """Why ``sender`` may not ask peer ``own`` for this seat, or an empty string."""
        plan = self.plan
        objections = {
            "only the entry itself may open a session": plan.entry != sender,
            "a session's id ends with its entry": not plan.session.endswith(plan.entry),
            "this stage is not mine": plan.stages[plan.stage][0] != own,
        }
        return next((objection for objection, holds in objections.items() if holds), "")

    def accepts(self, sender: PeerId, work: StageWork) -> bool:
        """Whether ``sender`` is the one peer that may send this kind of work to this stage."""
        match work:
            case Tokens():
                return self.plan.stage == 0 and sender == self.entry
            case Token():
                return self.plan.stage == 0 and sender == self.previous_peer
            case Hidden():
                return self.plan.stage > 0 and sender == self.previous_peer

    def has(self, layers: range) -> bool:
        """Whether any of these is its own."""
        return self.layers.start < layers.stop and layers.start < self.layers.stop

    def follows(self, plan: Reroute) -> bool:
        """Whether this is a later chain of the same session with this seat in it."""
        mine, stages = self.plan.stages[self.plan.stage], plan.stages
        return plan.generation > self.plan.generation and stages[plan.stage] == mine

    def renew(self, now: float) -> None:
        """Another lease, if the session has begun."""
        if self.has_begun:
            self.until = now + self.plan.lease_s

    def put(self, work: StageWork) -> None:
        """Have work wait. Raises asyncio.QueueFull."""
        self.inbox.put_nowait(work)
        self.waiting_bytes += size_of(work)

    async def take(self) -> StageWork:
        """The next work, when there is some."""
        work = await self.inbox.get()
        self.waiting_bytes -= size_of(work)
        return work

    def stop(self) -> None:
        """Do nothing until there is another chain."""
        for task in (self.task, self.errand):
            if task is not None:
                task.cancel()
        self.task = self.errand = None

    def orphan(self, now: float) -> None:
        """The link to the entry broke: wait for it, but not for long."""
        self.stop()
        self.until = min(self.until, now + ORPHANED_S)

    def clear(self) -> None:
        """Drop what waits: it belongs to another chain."""
        while not self.inbox.empty():
            self.inbox.get_nowait()
        self.waiting_bytes = 0

    def pace(self, now: float) -> float:
        """How long the last decode step took, or the present one has been taking (s); 0 without any."""
        return max(self.step_s, 0.0 if self.step_began is None else now - self.step_began)


def size_of(work: StageWork) -> int:
    """Bytes that waiting costs, beside a small constant."""
    return len(work.data) if isinstance(work, Hidden) else 0
