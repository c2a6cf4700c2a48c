"""The certifying solver: the true s*(k), to hold Phase 1 against. The paper has none.

It shares neither code nor ideas with Phase 1. Up to 10 peers it tries every choice of groups; up to 32 it
asks HiGHS for a flow of least cost in integers. Either way each region is solved by itself, since no pipeline
crosses regions, and the regions are combined by min-plus convolution:

    s*(k) = min over Σ k_r = k of Σ s*_r(k_r)
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import NamedTuple, TypeAlias

import numpy as np

from p2pllm.errors import ModelError
from p2pllm.scheduling.types import Capacity, Offer

__all__ = ["EXHAUSTIVE_PEERS", "fewest_stages"]

EXHAUSTIVE_PEERS = 10
_HIGHS_PEERS = 32
_HIGHS_LIMIT_S = 60.0
"""For one number of pipelines in one region; most take a tenth of a second."""

_Fewest: TypeAlias = dict[int, int]
"""Fewest stages by number of pipelines, for each number that is feasible."""


def fewest_stages(layers: int, offers: Sequence[Offer]) -> dict[int, int]:
    """Return s*(k), the fewest stages of k pipelines over ``[0, layers)``, for every feasible k ≥ 1.

    That is ``{}`` where no region can hold the model by itself.

    Raises ModelError for more than 32 peers, for more than 10 without scipy (the extra ``exact``), and when
    HiGHS runs out of time.
    """
    if len(offers) > _HIGHS_PEERS:
        raise ModelError(
            f"{len(offers)} peers are too many to certify, the limit is {_HIGHS_PEERS}: "
            "go by the bounds that the plan itself reports"
        )
    solve = _by_trying if len(offers) <= EXHAUSTIVE_PEERS else _by_flow
    regions: defaultdict[str, list[Capacity]] = defaultdict(list)
    for offer in offers:
        regions[offer.region].append(offer.capacity)
    fewest: _Fewest = {0: 0}
    for peers in regions.values():
        fewest = _min_plus(fewest, {0: 0} | solve(layers, peers))
    return {pipelines: stages for pipelines, stages in sorted(fewest.items()) if pipelines}


def _min_plus(left: _Fewest, right: _Fewest) -> _Fewest:
    """Return the fewest stages when the pipelines are shared out between two sets of regions."""
    fewest: _Fewest = {}
    for k, stages in left.items():
        for more, more_stages in right.items():
            both = stages + more_stages
            fewest[k + more] = min(both, fewest.get(k + more, both))
    return fewest


def _by_trying(layers: int, peers: Sequence[Capacity]) -> _Fewest:
    """Try every union of disjoint groups of peers; groups and unions are bit masks."""
    groups: list[int] = []
    for group in sorted(range(1, 1 << len(peers)), key=int.bit_count):
        # No pipeline needs a peer more than another pipeline that it contains.
        if any(group & smaller == smaller for smaller in groups):
            continue
        if _holds(layers, [peer for i, peer in enumerate(peers) if group >> i & 1]):
            groups.append(group)
    fewest: _Fewest = {}
    unions = {0}
    while unions := {union | group for union in unions for group in groups if not union & group}:
        fewest[len(fewest) + 1] = min(union.bit_count() for union in unions)
    return fewest


def _holds(layers: int, group: Sequence[Capacity]) -> bool:
    """Whether a group, used to the last peer, is a pipeline for some choice of its ends."""
    if len(group) == 1:
        return group[0].both >= layers
    if len(group) > layers or not all(peer.middle for peer in group):
        return False
    total = sum(peer.middle for peer in group)
    return any(
        first.first and last.last and total - first.middle + first.first - last.middle + last.last >= layers
        for first, last in permutations(group, 2)
    )


_FIRST, _LAST = 1, 2
_ENDS = _FIRST | _LAST


class _State(NamedTuple):
    """A pipeline half made: peers of types before ``type`` are dealt with."""

    type: int
    covered: int
    ends: int  # the bits of those that are taken


class _Arc(NamedTuple):
    """A way to go on; ``takes`` a peer of a type, or goes on to the next type."""

    source: _State
    target: _State
    takes: int | None


_START = _State(0, 0, 0)
_FULL = _State(-1, -1, _ENDS)


def _by_flow(layers: int, peers: Sequence[Capacity]) -> _Fewest:
    """Pack pipelines as units of flow, so that neither pipelines nor equal peers have names to permute.

    The path of a unit is one pipeline: it goes through the types of peers and takes some of each, from
    nothing covered to all covered. Taking a peer costs 1, and no more are taken of a type than there are.
    Relaxed to fractions this is about as tight as a variable for each possible pipeline would be, so HiGHS
    hardly has to branch.
    """
    clipped = (Capacity(*(min(layers, c) for c in (p.middle, p.first, p.last, p.both))) for p in peers)
    types = sorted(Counter(clipped).items(), reverse=True)
    arcs = _useful(_arcs(layers, types))
    # Eq 1. HiGHS may find earlier that no more pipelines can be made.
    most = min(len(peers), sum(peer.middle * count for peer, count in types) // layers)
    fewest: _Fewest = {}
    for pipelines in range(1, most + 1 if arcs else 1):
        stages = _cheapest_flow(arcs, [count for _, count in types], pipelines)
        if stages is None:
            break
        fewest[pipelines] = stages
    return fewest


def _arcs(layers: int, types: Sequence[tuple[Capacity, int]]) -> list[_Arc]:
    """Return every way to go on from every state that can be reached."""
    arcs: list[_Arc] = []
    reached = {_START}
    frontier = [_START]
    while frontier:
        state = frontier.pop()
        for target, takes in _steps(layers, types, state):
            arcs.append(_Arc(state, target, takes))
            if target not in reached and target != _FULL:
                reached.add(target)
                frontier.append(target)
    return arcs


def _steps(
    layers: int, types: Sequence[tuple[Capacity, int]], state: _State
) -> Iterator[tuple[_State, int | None]]:
    """Yield the states after one, each with the type of peer that is taken on the way."""
    peer, count = types[state.type]
    if state.type + 1 < len(types):
        yield state._replace(type=state.type + 1), None
    if not state.covered and peer.both >= layers:
        yield _FULL, state.type
    if layers == 1:
        return  # nothing to share between two peers
    following = state.type if count > 1 else state.type + 1
    for end, room in ((0, peer.middle), (_FIRST, peer.first), (_LAST, peer.last)):
        if room and not state.ends & end:
            # A pipeline of more peers than layers needs no rule: taking fewer of them is cheaper.
            covered, ends = min(layers, state.covered + room), state.ends | end
            if covered == layers and ends == _ENDS:
                yield _FULL, state.type
            elif following < len(types):
                yield _State(following, covered, ends), state.type


def _useful(arcs: Sequence[_Arc]) -> list[_Arc]:
    """Return the arcs from which the full pipeline can be reached."""
    into: defaultdict[_State, list[_State]] = defaultdict(list)
    for arc in arcs:
        into[arc.target].append(arc.source)
    useful = {_FULL}
    frontier = [_FULL]
    while frontier:
        new = set(into[frontier.pop()]) - useful
        useful |= new
        frontier += new
    return [arc for arc in arcs if arc.target in useful]


def _cheapest_flow(arcs: Sequence[_Arc], counts: Sequence[int], pipelines: int) -> int | None:
    """Return the fewest peers taken by ``pipelines`` units of flow, None when so many cannot flow.

    ``counts`` are the peers of each type. Raises ModelError without scipy and when time is up.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array
    except ImportError as error:
        raise ModelError(
            f"certifying a plan for more than {EXHAUSTIVE_PEERS} peers needs scipy: "
            "pip install 'p2pllm[exact]'"
        ) from error
    states = dict.fromkeys(state for arc in arcs for state in (arc.source, arc.target))
    rows = {state: row for row, state in enumerate(states)}
    entries = [(rows[arc.source], column, -1) for column, arc in enumerate(arcs)]
    entries += [(rows[arc.target], column, 1) for column, arc in enumerate(arcs)]
    entries += [(len(rows) + arc.takes, i, 1) for i, arc in enumerate(arcs) if arc.takes is not None]
    row, column, sign = zip(*entries, strict=True)
    # What flows into each state and out again, then what is taken of each type.
    low = np.zeros(len(rows) + len(counts))
    low[rows[_START]], low[rows[_FULL]] = -pipelines, pipelines
    high = low.copy()
    high[len(rows) :] = counts
    result = milp(
        [arc.takes is not None for arc in arcs],
        integrality=np.ones(len(arcs)),
        bounds=Bounds(0, np.inf),
        constraints=LinearConstraint(coo_array((sign, (row, column)), (len(low), len(arcs))), low, high),
        # Presolve takes longer than all the rest here.
        options={"mip_rel_gap": 0, "presolve": False, "time_limit": _HIGHS_LIMIT_S},
    )
    if result.status == 2:
        return None
    if result.status != 0:
        least = math.ceil((result.mip_dual_bound or 0) - 1e-6)
        found = "none found" if result.x is None else f"{round(result.fun)} found"
        raise ModelError(
            f"HiGHS could not tell in {_HIGHS_LIMIT_S:.0f} s how few stages {pipelines} pipelines of one "
            f"region need (at least {least}, {found}): plan without --certify"
        )
    stages: int = round(result.fun)
    return stages
