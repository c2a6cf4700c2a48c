"""The slice of a peer: how it follows the plan without leaving a layer that others count on.

Pure: plans, the view and the time go in, layers to load and to drop come out. It loads before it drops, and
drops only what others go on holding. Nothing but records tells what others are about to do, and those are a
little old. So a peer says first that it means to drop layers (they are ``draining``), waits until everybody
has heard it, and looks again. Whoever is draining does not count as a holder, so of two that mean to drop the
same layers at least one sees the other in time; where both do, the lower id takes its word back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from p2pllm.records import MAX_EPOCH, Span
from p2pllm.scheduling import Capacity, PeerId, Slice, runs, safe_moves, spread
from p2pllm.swarm.placement.layer_rows import Row, row_of, spans
from p2pllm.swarm.placement.members import Roster
from p2pllm.swarm.placement.swarm_plan import SwarmPlan
from p2pllm.swarm.view import PeerState

__all__ = ["Allocation", "Drop", "Load"]

HEARD_S = 2.0
"""Within this everybody has heard what a peer says of itself, or will soon count it as gone."""

GRACE_S = 30.0
"""How long sessions may go on with layers that are to be dropped; then they recover elsewhere."""

LEADERLESS_S = 6.0
"""Two leases: a peer without a slice waits no longer for somebody to give it one."""

MAX_SPANS = 3
"""What a record has room for."""

MAX_PIECES = 2
"""Into so many pieces at most may fall what a peer holds: old and new, so that any slice can be reached."""

MAX_RETRY_S = 60.0
"""How long a load that goes on failing is put off at most."""


@dataclass(frozen=True, slots=True)
class Load:
    """Load these layers, beside all that is held."""

    slice: Slice


@dataclass(frozen=True, slots=True)
class Drop:
    """Free the memory of these layers; sessions that still use them end here."""

    slice: Slice


class Allocation:
    """What one peer holds and is to hold.

    ``target`` is the slice that it is to hold, None as long as it was given none. ``generation`` grows
    whenever that changes, so that a plan made before is known to be old.
    """

    def __init__(
        self,
        own: PeerId,
        layers: int,
        capacity: Capacity,
        *,
        pinned: tuple[int, int] | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        """A ``pinned`` peer takes the layers [start, end), whatever ``capacity`` says, and no plan."""
        self.generation = 0
        self.paused = False
        self._own = own
        self._layers = layers
        self._capacity = capacity if pinned is None else Capacity.same(layers)
        self._pinned = None if pinned is None else Slice(own, *pinned)
        self._grace_s = grace_s
        self.target = self._pinned
        self._plan: SwarmPlan | None = None
        self._held, self._loading, self._draining, self._dropping = np.zeros((4, layers), dtype=np.bool_)
        self._said_s = -math.inf  # when it said what it drains
        self._paused_s = math.inf  # since when
        self._failures = 0
        self._retry_s = -math.inf

    def spans(self) -> tuple[Span, ...]:
        """Return what this peer holds and loads, at most 3 spans."""
        return spans(self._held, self._loading, self._draining)

    def follow(self, plan: SwarmPlan) -> bool:
        """Take the plan that counts now; True if it gives this peer another slice.

        A plan that is no newer than the last one, was made for another generation, or gives what does not
        fit, changes nothing.
        """
        if self._pinned is not None or self.paused:
            return False
        # Where epochs have come to their end, they no longer tell which plan is newer.
        if self._plan is not None and plan.key <= self._plan.key and plan.epoch < MAX_EPOCH:
            return False
        self._plan = plan
        entry = plan.entry(self._own)
        if (
            entry is None
            or entry.generation != self.generation
            or not self._capacity.holds(entry.start, entry.end, self._layers)
        ):
            return False
        return self._aim(Slice(self._own, entry.start, entry.end))

    def pause(self) -> None:
        """Drop everything once others hold it, or at the end of the grace; take no plan meanwhile."""
        if not self.paused:
            self.paused, self.target, self._paused_s = True, None, math.inf
            self.generation += 1

    def resume(self) -> None:
        """Take part again: a pinned peer takes its layers, any other waits for a plan."""
        if self.paused:
            self.paused, self.target = False, self._pinned
            self.generation += 1

    def loaded(self, piece: Slice) -> None:
        """A load is done: the layers are ready."""
        self._loading[piece.start : piece.end] = False
        self._held[piece.start : piece.end] = True
        self._failures = 0

    def failed(self, piece: Slice, now: float) -> None:
        """A load came to nothing; it is tried again after a while, unless a plan says otherwise."""
        self._loading[piece.start : piece.end] = False
        self.generation += 1
        self._failures += 1
        self._retry_s = now + min(2.0**self._failures, MAX_RETRY_S)

    def dropped(self, piece: Slice) -> None:
        """The memory of these layers is free."""
        for row in (self._held, self._draining, self._dropping):
            row[piece.start : piece.end] = False

    def step(
        self,
        now: float,
        states: Sequence[PeerState],
        sessions: Callable[[int, int], int],
        leaderless_s: float = 0.0,
    ) -> tuple[Load | Drop, ...]:
        """Return what to load and to drop now; to be called several times a second, and after each change.

        ``states`` are the live peers of the view, ``sessions`` counts those here that use any of the layers
        [start, end), ``leaderless_s`` says how long nobody has led.
        """
        if self.paused:
            self._paused_s = min(self._paused_s, now)
        if leaderless_s >= LEADERLESS_S and self._is_free():
            self._choose(states)
        keep = self._held if self.target is None and not self.paused else row_of(self._layers, self.target)
        missing, surplus = keep & ~self._held, self._held & ~keep
        self._draining = (self._draining & surplus) | self._dropping
        if len(self.spans()) > MAX_SPANS:
            # A part in the middle is wanted again, and a record has no room for all that this leaves.
            self._draining = self._dropping.copy()
        if not missing.any() and not surplus.any():
            return ()
        others = _Others(self._own, Roster.of(self._layers, states))
        # Force is for those who could not come to their slice otherwise, and who pauses waits only so long.
        is_over = self.paused and now - self._paused_s >= self._grace_s
        is_forced = is_over or bool(missing.any() and self._plan is not None and self._plan.force)
        if not is_forced and (self._draining & ~others.remaining()).any():
            self._draining = self._dropping.copy()
        if self._loading.any() or self._dropping.any():
            return ()
        load, may_drop = ([], is_over) if self.target is None else self._moves(others, self.target)
        if load and now < self._retry_s:
            return ()
        if load and (fitting := self._fitting(load)):
            return fitting
        may_drop |= (self.paused or bool(load)) and not (surplus & ~others.ready()).any()
        if may_drop and not self._draining.any():
            self._drain(now, surplus)
        is_heard = now - self._said_s >= HEARD_S and not (self._draining & ~others.ready(self._said_s)).any()
        return self._drops(now, sessions) if is_forced or is_heard else ()

    def _aim(self, target: Slice) -> bool:
        if target == self.target:
            return False
        self.target = target
        self.generation += 1
        self._failures, self._retry_s = 0, -math.inf
        return True

    def _is_free(self) -> bool:
        """Whether this peer has nothing to hold and would like to."""
        return self.target is None and not self.paused and not (self._held | self._loading).any()

    def _choose(self, states: Sequence[PeerState]) -> None:
        """Without a leader: take the lightest window that others leave, as a leader would say."""
        roster = Roster.of(self._layers, states)
        placed = [piece for member in roster.standing for piece in member.ready + member.loading]
        busy = {piece.peer for piece in placed} | {self._own}
        offers = [member.offer for member in roster.standing if member.offer.peer in busy]
        for piece in spread(self._layers, offers, placed):
            self._aim(piece)

    def _moves(self, others: _Others, target: Slice) -> tuple[list[Slice], bool]:
        """What may be loaded, and whether what is too much may be dropped, if others do what they may."""
        planned = others.roster.planned(self._plan.slices) if self._plan is not None else ()
        moves = safe_moves(
            self._layers,
            [*(Slice(self._own, *run) for run in runs(self._held)), *others.slices],
            [target, *(piece for piece in planned if piece.peer != self._own)],
            {**others.capacities, self._own: self._capacity},
            force=self._plan is not None and self._plan.force,
        )
        load = [piece for piece in moves.load if piece.peer == self._own]
        return load, any(piece.peer == self._own for piece in moves.drop)

    def _fitting(self, load: Sequence[Slice]) -> tuple[Load, ...]:
        """Begin to load as many of these as a record can tell of."""
        begun: list[Load] = []
        for piece in load:
            loading = self._loading | row_of(self._layers, piece)
            if (
                len(runs(self._held | loading)) <= MAX_PIECES
                and len(spans(self._held, loading, self._draining)) <= MAX_SPANS
            ):
                self._loading = loading
                begun.append(Load(piece))
        return tuple(begun)

    def _drain(self, now: float, surplus: Row) -> None:
        """Say that as much of this is to be dropped as a record can tell of; the rest comes later."""
        for run in runs(surplus):
            draining = self._draining | row_of(self._layers, Slice(self._own, *run))
            if len(spans(self._held, self._loading, draining)) <= MAX_SPANS:
                self._draining = draining
        self._said_s = now

    def _drops(self, now: float, sessions: Callable[[int, int], int]) -> tuple[Drop, ...]:
        """Drop what drains, unless sessions use it and are to be waited for."""
        drained = runs(self._draining)
        waits_until = min(self._said_s, self._paused_s if self.paused else math.inf) + self._grace_s
        if now < waits_until and any(sessions(*run) for run in drained):
            return ()
        self._dropping = self._draining.copy()
        return tuple(Drop(Slice(self._own, *run)) for run in drained)


class _Others:
    """What the other peers that stay hold."""

    def __init__(self, own: PeerId, roster: Roster) -> None:
        self._own = own
        self.roster = roster
        self._members = [member for member in roster.standing if member.offer.peer != own]

    @property
    def slices(self) -> list[Slice]:
        """All their ready slices."""
        return [piece for member in self._members for piece in member.ready]

    @property
    def capacities(self) -> dict[PeerId, Capacity]:
        """How many layers fit on each."""
        return {member.offer.peer: member.offer.capacity for member in self._members}

    def ready(self, since_s: float = -math.inf) -> Row:
        """The layers that those hold ready of whom there was news since then."""
        states = self.roster.states
        return row_of(
            self.roster.layers,
            *(piece for piece in self.slices if states[piece.peer].heard_s >= since_s),
        )

    def remaining(self) -> Row:
        """The layers with a holder that goes on or, having a lower id, takes it back that it drops them."""
        yielding = (
            piece
            for member in self._members
            if member.offer.peer < self._own
            for piece in self.roster.spans(member.offer.peer, "draining")
        )
        return row_of(self.roster.layers, *self.slices, *yielding)
