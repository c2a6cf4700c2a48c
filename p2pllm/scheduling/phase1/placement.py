"""Phase 1: how many replicas of the model a swarm holds, in which pipelines (Eq 1, 2 and 4).

No pipeline crosses regions, so each region is packed by itself, and s*(k) is the least sum over all ways to
share k replicas out among them (min-plus convolution). Bounds come first: each region knows lower bounds on
its own s*, together they bound Z(k) from above, and only what could still be the best is solved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from p2pllm.errors import ModelError
from p2pllm.scheduling.load import spread
from p2pllm.scheduling.network import Network
from p2pllm.scheduling.phase1.arrange import in_order
from p2pllm.scheduling.phase1.assembly import assemble, still_serves
from p2pllm.scheduling.phase1.crossing import across, shortfall
from p2pllm.scheduling.phase1.ferry import MAX_PEERS, cheapest_crossing
from p2pllm.scheduling.phase1.objective import Goal, Scores, Terms, throughput, throughput_bounds
from p2pllm.scheduling.phase1.plan import Candidate, Plan
from p2pllm.scheduling.phase1.sharing import Sharing
from p2pllm.scheduling.types import Assignment, Offer, Pipeline, Slice

__all__ = ["place"]

EFFORT = 1_000
"""Choices tried per question that rounding leaves open; see `rounding`."""

LIST_ALL = 24
"""Swarms of up to so many peers get a candidate for every feasible k."""

MAX_BUILT = 64
"""Numbers of replicas for which pipelines are built to predict their throughput."""

KEEP_GAIN = 1.05
"""A plan must promise this much more throughput before it replaces one that works."""


def place(
    layers: int,
    offers: Sequence[Offer],
    network: Network,
    *,
    goal: Goal | None = None,
    today: Assignment | None = None,
    effort: int = EFFORT,
) -> Plan:
    """The placement of ``layers`` on the peers that is best by ``goal``.

    Of equal numbers of replicas and stages the placement that moves little from ``today`` is taken, and if it
    gains less than 5 % of predicted throughput nothing moves at all.

    Raises ModelError when the peers together cannot hold the model, saying how many layers are missing, and
    ValueError for no layers, no peers or two offers of one peer.
    """
    placement = _Placement(
        layers, offers, network, goal=goal or Goal(), today=today or Assignment(), effort=effort
    )
    return placement.plan()


@dataclass(frozen=True, slots=True)
class _Choice:
    """What the search over k ends with."""

    best: Candidate
    pipelines: list[Pipeline]
    candidates: tuple[Candidate, ...]
    z_bound: float


class _Placement:
    """One run of Phase 1, from offers to a plan."""

    def __init__(
        self,
        layers: int,
        offers: Sequence[Offer],
        network: Network,
        *,
        goal: Goal,
        today: Assignment,
        effort: int,
    ) -> None:
        self._offers = {offer.peer: offer for offer in offers}
        if layers < 1 or not offers or len(self._offers) < len(offers):
            raise ValueError("a placement needs a layer, a peer, and one offer of each peer")
        self._layers = layers
        self._network = network
        self._objective = goal.objective
        self._today = today
        self._effort = effort
        self._terms = Terms.of(layers, offers, network, goal)
        self._sharing = Sharing(layers, offers, effort=effort)

    def plan(self) -> Plan:
        """Choose k, build, and see whether today's pipelines can stay."""
        choice = self._within_regions() or self._across_regions()
        pipelines, kept = self._steady(choice)
        replicas, stages = len(pipelines), sum(len(pipeline.slices) for pipeline in pipelines)
        scores = Scores(
            self._terms.linear(replicas, stages),
            self._terms.ratio(replicas, stages),
            self._tokens_per_s(pipelines),
        )
        bound = next((c.stages_bound for c in choice.candidates if c.k == replicas), replicas)
        z: float = getattr(scores, self._objective)
        return Plan(
            k=replicas,
            stages=stages,
            z=z,
            candidates=choice.candidates,
            pipelines=tuple(pipelines),
            spares=self._spares(pipelines, kept=kept),
            # Only where nothing else would do is there a pipeline that crosses, and then it is the only one.
            crossings=self._crossings(pipelines[0]),
            # One of today that stays may cross other regions than a new one would, in fewer stages.
            stages_bound=min(bound, stages),
            z_bound=max(choice.z_bound, z),
            scores=scores,
            r_rtt_s=self._terms.r_rtt_s,
            t_comp_s=self._terms.t_comp_s,
            kept=kept,
        )

    def _within_regions(self) -> _Choice | None:
        """The best over all k, None if no region holds a replica alone."""
        sharing = self._sharing
        lower = sharing.bounds().tolist()
        left = {k: self._bound(k, lower[k]) for k in range(1, len(lower))}
        solved: dict[int, tuple[Candidate, list[int]]] = {}
        best: Candidate | None = None
        z_bound = -math.inf
        while left:
            k = max(left, key=lambda k: self._rank(left[k], lower[k]))
            if best is not None and len(self._offers) > LIST_ALL:
                enough = self._objective == "throughput" and len(solved) >= MAX_BUILT
                if enough or self._rank(left[k], lower[k]) <= self._rank(best.z, best.stages):
                    break
            stages, bound, shares = sharing.solve(k)
            left = {n: z for n, z in left.items() if n != k and n <= sharing.most}
            z_bound = max(z_bound, self._bound(k, bound))
            if stages < math.inf:
                candidate = Candidate(k, int(stages), self._value(k, stages, shares), int(bound))
                solved[k] = candidate, shares
                if best is None or self._rank(candidate.z, stages) > self._rank(best.z, best.stages):
                    best = candidate
        if best is None:
            return None
        candidates = tuple(solved[k][0] for k in sorted(solved))
        return _Choice(best, self._build(solved[best.k][1]), candidates, max([z_bound, *left.values()]))

    def _across_regions(self) -> _Choice:
        """The one pipeline over several regions.

        Raises ModelError when all peers together do not hold the model.
        """
        found = self._crossing()
        if found is None:
            raise ModelError(shortfall(self._layers, list(self._offers.values())))
        pipeline, bound = found
        stages = len(pipeline.slices)
        z = self._tokens_per_s([pipeline]) if self._objective == "throughput" else self._bound(1, stages)
        best = Candidate(1, stages, z, bound)
        return _Choice(best, [pipeline], (best,), self._bound(1, bound))

    def _crossing(self) -> tuple[Pipeline, int] | None:
        """A pipeline over several regions and a bound on its stages: of few peers exactly the best one."""
        offers = [offer for offer in self._offers.values() if offer.capacity.middle]
        # Where nothing is measured, hops between two regions are alike, and regions can be chosen first.
        if self._network.measured and len(offers) <= MAX_PEERS:
            order = cheapest_crossing(self._layers, offers, self._network)
            if order is not None:
                return in_order(self._layers, order), len(order)
        regions = self._sharing.regions
        found = across(self._layers, regions, self._network, effort=self._effort)
        if found is None:
            return None
        names, packing = found
        members = [offer for name in names for offer in regions[name]]
        today = self._today.pipelines
        (pipeline,) = assemble(packing.kinds, packing.found[1], members, self._network, today)
        return pipeline, int(packing.lower[1])

    def _steady(self, choice: _Choice) -> tuple[list[Pipeline], bool]:
        """(pipelines, whether those of today just stay): the choice, or what moves less and is as good."""
        if not self._today.pipelines:
            return choice.pipelines, False
        crossing = any(self._crossings(pipeline) for pipeline in choice.pipelines)
        intact = [
            pipeline
            for pipeline in self._today.pipelines
            if still_serves(self._layers, pipeline, self._offers)
            and (crossing or not self._crossings(pipeline))
        ]
        if crossing:
            intact = intact[:1]
        if not intact:
            return choice.pipelines, False
        working = self._tokens_per_s(intact)
        if working and self._tokens_per_s(choice.pipelines) <= KEEP_GAIN * working:
            return intact, True
        # All that serve stay, and the other peers make up the rest, if that takes no more stages.
        busy = {part.peer for pipeline in intact for part in pipeline.slices}
        others = [offer for peer, offer in self._offers.items() if peer not in busy]
        more = choice.best.k - len(intact)
        if others and more > 0:
            sharing = Sharing(self._layers, others, effort=self._effort)
            stages, _, shares = sharing.solve(more)
            if stages + len(busy) <= choice.best.stages:
                return intact + sharing.build(shares, self._network, self._today.pipelines), False
        return choice.pipelines, False

    def _bound(self, replicas: int, stages: float) -> float:
        """The most that so many replicas can be worth if they take at least so many stages."""
        if stages == math.inf:
            return -math.inf
        match self._objective:
            case "linear":
                return self._terms.linear(replicas, stages)
            case "ratio":
                return self._terms.ratio(replicas, stages)
            case "throughput":
                return self._throughput_bounds[replicas]

    @cached_property
    def _throughput_bounds(self) -> list[float]:
        """For every k that is not proven impossible; for one pipeline that crosses regions too."""
        return throughput_bounds(self._layers, list(self._offers.values()), max(1, self._sharing.most))

    def _rank(self, z: float, stages: float) -> tuple[float, float]:
        """More Z is better, then fewer stages; rounded, for equal Z may come by different sums. A linear one
        is a difference of figures near 1; the others may be of any size.
        """
        return round(z, 9) if self._objective == "linear" else float(f"{z:.9g}"), -stages

    def _value(self, replicas: int, stages: float, shares: Sequence[int]) -> float:
        if self._objective == "throughput":
            return self._tokens_per_s(self._build(shares))
        return self._bound(replicas, stages)

    def _build(self, shares: Sequence[int]) -> list[Pipeline]:
        return self._sharing.build(shares, self._network, self._today.pipelines)

    def _tokens_per_s(self, pipelines: Sequence[Pipeline]) -> float:
        return throughput(pipelines, self._offers, self._network)

    def _crossings(self, pipeline: Pipeline) -> int:
        ring = [self._offers[part.peer].region for part in pipeline.slices]
        return sum(a != b for a, b in zip(ring, [*ring[1:], ring[0]], strict=True))

    def _spares(self, pipelines: Sequence[Pipeline], *, kept: bool) -> tuple[Slice, ...]:
        """Let peers without a pipeline join; where the pipelines stay, so do the spares of today."""
        placed = [part for pipeline in pipelines for part in pipeline.slices]
        busy = {part.peer for part in placed}
        staying = [
            part
            for part in self._today.spares
            if kept
            and part.peer in self._offers
            and part.peer not in busy
            and self._offers[part.peer].capacity.holds(part.start, part.end, self._layers)
        ]
        return (*staying, *spread(self._layers, list(self._offers.values()), [*placed, *staying]))
