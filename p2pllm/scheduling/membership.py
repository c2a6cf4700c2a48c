"""Joins, leaves, and when to place everybody anew: what a leader asks once a second.

Pure: the members of the view, the plan and the time go in, a decision comes out, and a ``State`` that the
caller hands back next time. Layers count as covered when a peer that stays holds them ready, loads them, or
has them in the plan: decisions follow where everybody is going, and ``safe_moves`` how they get there.

- A newcomer joins where the layers are lightest. Nobody else moves.
- A peer leaves: nothing happens as long as its layers have other holders.
- Some layer has none: Phase 1 for everybody, unless that was done less than an interval ago. Until the
  interval is over, or where Phase 1 finds no way, the gap is mended by spares, and by peers all of whose
  layers have other holders.
- The loads (Eq 5) have become uneven: Phase 1, no oftener than the interval, with hysteresis and back-off.
- An operator asks: Phase 1 at once; this alone is exempt from the interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from p2pllm.scheduling.load import (
    coefficient_of_variation,
    holdable,
    holder_counts,
    loads,
    roomiest_first,
    spread,
    window,
)
from p2pllm.scheduling.types import Offer, PeerId, Slice

__all__ = ["Decision", "Join", "Member", "Mend", "Nothing", "Replan", "Rules", "State", "decide", "mend"]


@dataclass(frozen=True, slots=True)
class Member:
    """A live peer as the view shows it.

    ``ready`` and ``loading`` are the slices that its records say it holds; what it drains is in neither. A
    peer that is ``leaving`` covers nothing any more. One that is ``pinned`` chose its layers itself and is
    never given others.
    """

    offer: Offer
    ready: tuple[Slice, ...] = ()
    loading: tuple[Slice, ...] = ()
    leaving: bool = False
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Rules:
    """When loads are uneven, and how often everybody may be placed anew.

    ``threshold`` and ``low`` are coefficients of variation of the layers' loads; ``min_interval_s`` is the
    least time between two placements, ``max_interval_s`` how far it grows when they follow each other.
    """

    threshold: float = 0.25
    low: float = 0.15
    min_interval_s: float = 30.0
    max_interval_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class State:
    """What a leader remembers from one decision to the next; one that takes over starts with its own time.

    ``replanned_s`` is when everybody was last placed anew. ``wait_s`` is the least time from then until
    uneven loads are a reason to do so again. ``left`` is the least unevenness seen since, None before the
    first look: loads must become uneven by a whole threshold beyond it, so a placement that could not make
    them even is not tried again and again. Once they are below the low mark it is 0.
    """

    replanned_s: float = -math.inf
    wait_s: float = 0.0
    left: float | None = 0.0


@dataclass(frozen=True, slots=True)
class Nothing:
    """All is well, or nothing can be done yet."""


@dataclass(frozen=True, slots=True)
class Join:
    """Newcomers take these slices; nobody else moves."""

    slices: tuple[Slice, ...]


@dataclass(frozen=True, slots=True)
class Mend:
    """Newcomers, and peers whose own layers all have other holders, take these slices to close a gap."""

    slices: tuple[Slice, ...]


@dataclass(frozen=True, slots=True)
class Replan:
    """Phase 1 for everybody."""

    reason: Literal["uncovered", "unbalanced", "requested"]


Decision: TypeAlias = Nothing | Join | Mend | Replan


def decide(
    layers: int,
    members: Sequence[Member],
    plan: Sequence[Slice],
    state: State,
    now: float,
    *,
    rules: Rules = Rules(),
    requested: bool = False,
) -> tuple[Decision, State]:
    """Return what to do now, and the state for the next call.

    ``plan`` has at most one slice a peer; slices of peers that are gone are ignored, and a member without one
    counts with what it holds or loads. ``now`` is any clock (s) that only goes forward. ``requested`` says
    that an operator wants a new placement.

    When Phase 1 cannot place uncovered layers (ModelError), nobody was placed: do what ``mend`` says and go
    on with the old state, so that the peer that is lacking is welcome at once. A plan that keeps everything
    as it is counts as a placement.
    """
    standing = [member for member in members if not member.leaving]
    slices = _heading(standing, plan)
    elapsed = now - state.replanned_s
    if requested:
        return Replan("requested"), State(now, left=None)
    if not holder_counts(layers, slices).all():
        if elapsed >= rules.min_interval_s:
            return Replan("uncovered"), State(now, state.wait_s, left=None)
        return mend(layers, members, plan), state

    offers = _offers(standing, slices)
    unevenness = coefficient_of_variation(loads(layers, offers, slices))
    left = unevenness if state.left is None else min(state.left, unevenness)
    state = replace(state, left=left if unevenness > rules.low else 0.0)
    joined = spread(layers, offers, slices)
    if joined:
        return Join(joined), state
    if unevenness > left + rules.threshold and elapsed >= max(rules.min_interval_s, state.wait_s):
        return Replan("unbalanced"), State(now, _next_wait(state, elapsed, rules), left=None)
    return Nothing(), state


def mend(layers: int, members: Sequence[Member], plan: Sequence[Slice]) -> Nothing | Join | Mend:
    """Return how to close a gap without a placement: none is due yet, or Phase 1 finds none, because a peer
    is lacking or because it takes pinned ones to hold the model.

    Spares come first; only if they leave a gap, and only if that closes it, also peers move that others can
    do without. Nobody else moves.
    """
    standing = [member for member in members if not member.leaving]
    slices = _heading(standing, plan)
    joined = spread(layers, _offers(standing, slices), slices)
    count = holder_counts(layers, [*slices, *joined])
    moved = () if count.all() else _into_gaps(layers, standing, slices, count)
    if moved:
        return Mend((*joined, *moved))
    return Join(joined) if joined else Nothing()


def _heading(members: Iterable[Member], plan: Sequence[Slice]) -> list[Slice]:
    """What each member has in the plan, else what it holds or loads."""
    planned = {piece.peer: piece for piece in plan}
    slices: list[Slice] = []
    for member in members:
        piece = planned.get(member.offer.peer)
        slices.extend(member.ready + member.loading if piece is None else [piece])
    return slices


def _offers(members: Iterable[Member], slices: Sequence[Slice]) -> list[Offer]:
    """The offers of those who have a slice or may be given one."""
    busy = {piece.peer for piece in slices}
    return [m.offer for m in members if m.offer.peer in busy or not m.pinned]


def _next_wait(state: State, elapsed: float, rules: Rules) -> float:
    """Twice the last wait, or the minimum after a long quiet: peers that come and go in turn must not keep
    the swarm moving, even when each time there is something to gain.
    """
    if elapsed >= 2 * rules.max_interval_s:
        return rules.min_interval_s
    return min(max(2 * state.wait_s, rules.min_interval_s), rules.max_interval_s)


def _into_gaps(
    layers: int, members: Iterable[Member], slices: Iterable[Slice], count: npt.NDArray[np.intp]
) -> tuple[Slice, ...]:
    """Moves that together cover every layer, of peers whose own ``slices`` all have other holders; () if
    there are none that do. ``count`` is how many hold each layer, [L].
    """
    movable = {member.offer.peer for member in members if not member.pinned}
    own: dict[PeerId, list[Slice]] = {}
    for piece in slices:
        own.setdefault(piece.peer, []).append(piece)
    moved: list[Slice] = []
    for offer in roomiest_first(m.offer for m in members if m.offer.peer in movable & own.keys()):
        rest = count - holder_counts(layers, own[offer.peer])
        if ((rest == 0) & (count > 0)).any():
            continue
        able = holdable(layers, offer.capacity)
        gap = [layer for layer in np.flatnonzero(count == 0).tolist() if layer in able]
        span = window(layers, offer.capacity, gap[0]) if gap else None
        if span is None:
            continue
        moved.append(Slice(offer.peer, *span))
        count = rest + holder_counts(layers, moved[-1:])
        if count.all():
            return tuple(moved)
    return ()
