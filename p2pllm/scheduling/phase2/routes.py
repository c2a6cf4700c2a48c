"""Phase 2: the chain of stages that serves a session at the least time per token (Eq 3).

``Routes`` is kept alive and told one thing at a time: what a peer holds, how far it is. From that a search
takes its arrays in a few vector operations, and ``ring.py`` solves it. ``find_chain`` is the one-shot form.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from p2pllm.errors import NoRouteError
from p2pllm.scheduling.network import Network
from p2pllm.scheduling.phase2.choices import STALE_S
from p2pllm.scheduling.phase2.cover import gaps
from p2pllm.scheduling.phase2.hops import Floats, Ints
from p2pllm.scheduling.phase2.layout import Layout, lay_out
from p2pllm.scheduling.phase2.mesh import Mesh
from p2pllm.scheduling.phase2.ring import Problem, Ring, best_ring
from p2pllm.scheduling.phase2.vertices import Rows, Vertices
from p2pllm.scheduling.types import Chain, Holder, PeerId, Rho, Stage

__all__ = ["Routes", "find_chain"]

_SPREAD = 1.05
"""Upper end of the random factor on τ that spreads entries over near-equal chains."""


def find_chain(
    layers: int,
    holders: Iterable[Holder],
    rho: Rho,
    *,
    entry: PeerId | None = None,
    expected_tokens: int = 128,
    kv_blocks: int = 0,
    excluded: frozenset[PeerId] = frozenset(),
    severed: frozenset[tuple[PeerId, PeerId]] = frozenset(),
    fixed: Sequence[Stage] = (),
    now: float | None = None,
    rng: random.Random | None = None,
) -> Chain:
    """Return the chain over ``[0, layers)`` with the least latency per token: ``Routes.find`` asked once.

    ``rho`` other than a ``Network`` is asked for every pair of peers, which is meant for few of them.
    """
    spans: dict[PeerId, list[Holder]] = {}
    for holder in holders:
        spans.setdefault(holder.peer, []).append(holder)
    if not isinstance(rho, Network):
        peers = {*spans, *(stage.peer for stage in fixed)} | ({entry} if entry is not None else set())
        rho = Network.table(peers, rho)
    routes = Routes(layers, rho)
    for peer, held in spans.items():
        routes.put(peer, held)
    return routes.find(
        entry=entry,
        expected_tokens=expected_tokens,
        kv_blocks=kv_blocks,
        excluded=excluded,
        severed=severed,
        fixed=fixed,
        now=now,
        rng=rng,
    )


class Routes:
    """Chains through a swarm of which one thing changes at a time; ``mesh`` takes the changes of ρ."""

    def __init__(self, layers: int, network: Network | None = None) -> None:
        """Raises ValueError for less than one layer, and for ρ that are negative or not a number."""
        if layers < 1:
            raise ValueError(f"a model has at least one layer, not {layers}")
        self.mesh = Mesh(network)
        self._layers = layers
        self._vertices = Vertices()
        self._kept: Layout | None = None
        self._kept_version = 0

    def put(self, peer: PeerId, holders: Iterable[Holder]) -> None:
        """Say what a peer holds now, in place of what it held before; nothing when it holds no more.

        Raises ValueError for empty spans and for times that are negative or not finite.
        """
        if self._vertices.put(self.mesh.number(peer), holders):
            self._kept = None

    def drop(self, peer: PeerId) -> None:
        """Forget a peer, with what it holds and how far it is."""
        self.put(peer, ())
        self.mesh.drop(peer)

    def find(
        self,
        *,
        entry: PeerId | None = None,
        expected_tokens: int = 128,
        kv_blocks: int = 0,
        excluded: frozenset[PeerId] = frozenset(),
        severed: frozenset[tuple[PeerId, PeerId]] = frozenset(),
        fixed: Sequence[Stage] = (),
        waits: Mapping[PeerId, float] | None = None,
        now: float | None = None,
        stale_s: float = STALE_S,
        rng: random.Random | None = None,
        effort: float = math.inf,
    ) -> Chain:
        """Return the chain with the least latency per token.

        Minimised is Σ τ + Σ ρ + ρ(last, first) and, given an ``entry``, also (ρ(entry, first) + ρ(last,
        entry)) / ``expected_tokens``; the chain's ``latency_s`` leaves the entry's share out. τ is
        ``wait_s``, a stage's layers times ``layer_s`` and, on the last stage, ``head_s``. The minimum is
        exact, unless the search ends after 64 passes or after it went through ``effort`` numbers; ``gap_s``
        then says how much less another chain might take.

        Not used are peers in ``excluded``, hops in ``severed`` (from, to), peers known to have fewer than
        ``kv_blocks`` free, those that are leaving and, given the time ``now``, those with no record since
        ``stale_s`` seconds. ``fixed`` stages, in order, are in the chain as they are, whatever their peers
        are like; only what is between them is sought. ``waits`` (s) add to ``wait_s``. With ``rng``, each τ
        is scaled by U(1, 1.05) while choosing.

        Raises NoRouteError, with the layer ranges that nobody can serve (none if the peers just cannot reach
        each other), and ValueError for less than one expected token and for ``fixed`` stages that overlap or
        are no layers of the model.
        """
        if expected_tokens < 1:
            raise ValueError(f"at least one token must be expected, not {expected_tokens}")
        pinned = self._pinned(fixed)
        layout = self._layout(pinned, severed)
        rows = np.concatenate((pinned, self._vertices.all()))[layout.order]
        for peer, seconds in (waits or {}).items():
            rows["wait_s"][rows["peer"] == self.mesh.known(peer)] += seconds
        is_fresh = rows["heard_s"] >= (-math.inf if now is None else now - stale_s)
        is_usable = is_fresh & (rows["kv_blocks"] >= kv_blocks)
        if excluded:
            barred = np.isin(rows["peer"], [self.mesh.known(peer) for peer in excluded])
            is_usable &= ~barred | (layout.order < len(pinned))
        spread = _spread(len(rows), rng)
        work = np.diff(layout.bounds)[:, None] * (rows["layer_s"] * spread)
        work += layout.away
        work[-1] += rows["head_s"] * spread
        enter, leave = self._entry_share(entry, layout.peers, expected_tokens, severed)
        ring = best_ring(
            Problem(
                work=work,
                wait=np.where(is_usable, rows["wait_s"] * spread, np.inf),
                enter=enter[layout.position],
                leave=leave[layout.position],
                peer=layout.position,
                hops=layout.hops,
            ),
            effort,
        )
        if ring is None:
            raise self._no_route(rows[is_usable], rows[is_fresh])
        return self._chain(ring, rows, layout.bounds)

    def work_s(self, chain: Chain) -> dict[PeerId, float]:
        """Return the seconds that a token of ``chain`` keeps each of its peers at work, waits left out."""
        seconds: dict[PeerId, float] = {}
        for stage in chain.stages:
            row = self._row(stage)
            work = (stage.end - stage.start) * row["layer_s"] + (stage.end == self._layers) * row["head_s"]
            seconds[stage.peer] = seconds.get(stage.peer, 0.0) + float(work[0])
        return seconds

    def _row(self, stage: Stage) -> Rows:
        """Return a copy, [1], of a row of the peer of a stage; its times are 0 when it holds nothing now."""
        number = self.mesh.known(stage.peer)
        rows = self._vertices.of(number)[:1]
        row = rows if len(rows) else np.zeros(1, dtype=rows.dtype)
        row["peer"] = number
        return row

    def _pinned(self, fixed: Sequence[Stage]) -> Rows:
        """Return a row for each fixed stage, always usable, that holds just its layers."""
        edges = [edge for stage in fixed for edge in (stage.start, stage.end)]
        if edges != sorted(edges) or any(not 0 <= s.start < s.end <= self._layers for s in fixed):
            raise ValueError(f"fixed stages must be layers of the model, in order and apart, not {edges}")
        rows = np.concatenate([self._vertices.of(-1), *(self._row(stage) for stage in fixed)])
        rows["start"], rows["end"] = edges[::2], edges[1::2]
        rows["kv_blocks"] = rows["heard_s"] = np.inf
        if (rows["peer"] < 0).any():
            raise NoRouteError((), "a stage to keep is on a peer that has left the swarm")
        return rows

    def _layout(self, pinned: Rows, severed: frozenset[tuple[PeerId, PeerId]]) -> Layout:
        """Return the layout for one search; the usual one is kept until something changes it."""
        if len(pinned) or severed:
            rows = np.concatenate((pinned, self._vertices.all()))
            return lay_out(self._layers, self.mesh, rows, len(pinned), severed)
        if self._kept is None or self._kept_version != self.mesh.version:
            self._kept = lay_out(self._layers, self.mesh, self._vertices.all(), 0, ())
            self._kept_version = self.mesh.version
        return self._kept

    def _entry_share(
        self,
        entry: PeerId | None,
        peers: Ints,
        expected_tokens: int,
        severed: frozenset[tuple[PeerId, PeerId]],
    ) -> tuple[Floats, Floats]:
        """Return what each peer as first or as last ([P] each) adds to a token for the entry's sake."""
        if entry is None:
            return np.zeros(len(peers)), np.zeros(len(peers))
        enter, leave = self.mesh.way(entry, peers), self.mesh.way(entry, peers, back=True)
        for source, target in severed:
            if source == entry:
                enter[peers == self.mesh.known(target)] = np.inf
            if target == entry:
                leave[peers == self.mesh.known(source)] = np.inf
        return enter / expected_tokens, leave / expected_tokens

    def _chain(self, ring: Ring, rows: Rows, bounds: Ints) -> Chain:
        """Return the chain of a ring, with its latency by the true, unspread τ."""
        switches = [int(bounds[visit.segment]) for visit in ring.visits] + [self._layers]
        stages: list[Stage] = []
        latency = 0.0
        for visit, (start, end) in zip(ring.visits, itertools.pairwise(switches), strict=True):
            row = rows[visit.holder]
            stages.append(Stage(self.mesh.name(int(row["peer"])), start, end))
            latency += float(row["wait_s"]) + (end - start) * float(row["layer_s"])
        latency += float(rows["head_s"][ring.visits[-1].holder]) + ring.hops_s
        return Chain(tuple(stages), latency, ring.gap_s)

    def _no_route(self, usable: Rows, fresh: Rows) -> NoRouteError:
        """Return why there is no chain: layers without a holder, else without a usable one, else no way."""
        missing, never = (
            gaps(self._layers, zip(rows["start"].tolist(), rows["end"].tolist(), strict=True))
            for rows in (usable, fresh)
        )
        if never:
            return NoRouteError(never)
        if missing:
            ranges = ", ".join(f"{start}:{end}" for start, end in missing)
            reason = f"every peer that serves layers {ranges} is full or failed: try again shortly"
        else:
            reason = (
                f"no chain connects the peers that serve layers 0:{self._layers}: "
                "see that they can reach each other"
            )
        return NoRouteError(missing, reason)


def _spread(count: int, rng: random.Random | None) -> Floats:
    """Return what the τ of each holder is multiplied with, [H]."""
    if rng is None:
        return np.ones(count)
    return np.random.default_rng(rng.getrandbits(64)).uniform(1.0, _SPREAD, count)
