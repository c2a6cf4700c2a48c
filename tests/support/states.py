"""Peers as the view shows them, in a word."""

from __future__ import annotations

import math
from typing import Any

from p2pllm.records import PlanEntry, Span, SpanState
from p2pllm.scheduling import Capacity
from p2pllm.swarm.placement.swarm_plan import SwarmPlan
from p2pllm.swarm.view import PeerState
from support.bodies import metrics_body, peer_body

__all__ = ["full", "plan_of", "state"]


def full(name: str) -> str:
    """A peer id that begins with the name; ids are ordered as names are."""
    return name.ljust(40, "0")


def state(
    name: str,
    room: int | Capacity,
    *spans: tuple[int, int] | tuple[int, int, SpanState],
    generation: int = 0,
    heard_s: float = math.inf,
    **body: Any,
) -> PeerState:
    """A peer with room for some layers that holds spans, ready ones unless they say otherwise."""
    capacity = room if isinstance(room, Capacity) else Capacity.same(room)
    ready: SpanState = "ready"
    metrics = metrics_body(
        spans=tuple(Span(span[0], span[1], span[2] if len(span) > 2 else ready) for span in spans),
        generation=generation,
    )
    return PeerState(full(name), peer_body(capacity=tuple(capacity), **body), metrics, heard_s)


def plan_of(
    number: int = 1,
    *,
    leader: str = "leader",
    epoch: int = 1,
    force: bool = False,
    **slices: tuple[int, int] | tuple[int, int, int],
) -> SwarmPlan:
    """A plan that gives named peers (start, end, generation); generation 0 if it is left out."""
    entries = tuple(PlanEntry(full(name)[:16], *(*piece, 0)[:3]) for name, piece in slices.items())
    return SwarmPlan(full(leader), epoch, number, 0, 0, 0.0, force, entries)
