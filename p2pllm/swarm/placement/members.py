"""From what peers say of themselves to what scheduling decides upon.

Peers can say anything. Whoever offers what cannot be is left out, and figures beyond any hardware count as
the limit, so that no sum of them overflows.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from p2pllm.records import PlanEntry, SpanState
from p2pllm.scheduling import Assignment, Capacity, Member, Offer, PeerId, Pipeline, Slice, uncovered
from p2pllm.swarm.latency import PREFIX
from p2pllm.swarm.view import PeerState

__all__ = ["Roster", "assignment_of", "member_of", "offer_of", "spans_of"]

MAX_KV_BYTES = 2**50
MAX_FLOPS = 1e18


def offer_of(state: PeerState) -> Offer | None:
    """What a peer brings to a placement; None if it cannot be."""
    body = state.body
    try:
        return Offer(
            peer=state.peer,
            region=body.region,
            capacity=Capacity(*body.capacity),
            layer_s=body.layer_s,
            head_s=body.head_s,
            kv_bytes=min(body.kv_bytes, MAX_KV_BYTES),
            flops=min(body.flops, MAX_FLOPS),
        )
    except ValueError:
        return None


def spans_of(state: PeerState, layers: int, kind: SpanState) -> Iterator[Slice]:
    """The slices of a model of so many layers that a peer says are loading, ready or draining."""
    for span in state.metrics.spans if state.metrics is not None else ():
        if span.state == kind and span.end <= layers:
            yield Slice(state.peer, span.start, span.end)


def member_of(state: PeerState, layers: int) -> Member | None:
    """A live peer of a model of so many layers; None if its offer cannot be.

    A paused peer covers as little as one that leaves.
    """
    offer = offer_of(state)
    if offer is None:
        return None
    return Member(
        offer=offer,
        ready=tuple(spans_of(state, layers, "ready")),
        loading=tuple(spans_of(state, layers, "loading")),
        leaving=state.body.leaving or state.body.paused,
        pinned=state.body.pinned,
    )


@dataclass(frozen=True, slots=True)
class Roster:
    """The members of a swarm at one moment: live peers that have said what they hold and could hold."""

    layers: int
    states: Mapping[PeerId, PeerState]
    members: tuple[Member, ...]

    @classmethod
    def of(cls, layers: int, states: Sequence[PeerState]) -> Roster:
        """Return those among the live peers of a model of so many layers."""
        known = {state.peer: state for state in states if state.metrics is not None}
        members = tuple(member for state in known.values() if (member := member_of(state, layers)))
        return cls(layers, {member.offer.peer: known[member.offer.peer] for member in members}, members)

    @property
    def standing(self) -> tuple[Member, ...]:
        """Those that stay."""
        return tuple(member for member in self.members if not member.leaving)

    @property
    def offers(self) -> tuple[Offer, ...]:
        """What those bring that stay and may be given layers."""
        return tuple(member.offer for member in self.standing if not member.pinned)

    @property
    def serves(self) -> bool:
        """Whether every layer has a ready holder."""
        return not uncovered(self.layers, (h for state in self.states.values() for h in state.holders()))

    def planned(self, entries: Sequence[PlanEntry]) -> tuple[Slice, ...]:
        """Return what a plan gives to peers that are still here and can hold it."""
        peers = {offer.peer[:PREFIX]: offer.peer for offer in self.offers}
        return self.holdable(
            Slice(peer, entry.start, entry.end) for entry in entries if (peer := peers.get(entry.peer))
        )

    def holdable(self, slices: Iterable[Slice]) -> tuple[Slice, ...]:
        """Return those of these slices whose peers are still here and can hold them."""
        offers = {offer.peer: offer for offer in self.offers}
        return tuple(
            piece
            for piece in slices
            if (offer := offers.get(piece.peer)) and offer.capacity.holds(piece.start, piece.end, self.layers)
        )

    def unplanned(self, slices: Sequence[Slice]) -> tuple[Slice, ...]:
        """Return what peers hold or load, the longest span of each, that may be given layers and are not."""
        planned = {piece.peer for piece in slices}
        return tuple(
            max(held, key=lambda piece: piece.end - piece.start)
            for member in self.standing
            if not member.pinned
            and member.offer.peer not in planned
            and (held := member.ready + member.loading)
        )

    def entries(self, slices: Sequence[Slice]) -> tuple[PlanEntry, ...]:
        """Return slices as a plan says them, each for the generation in which its peer is now."""
        return tuple(
            PlanEntry(piece.peer[:PREFIX], piece.start, piece.end, self.generation(piece.peer))
            for piece in slices
        )

    def generation(self, peer: PeerId) -> int:
        """Return in which generation a member's allocation is."""
        metrics = self.states[peer].metrics
        return 0 if metrics is None else metrics.generation

    def spans(self, peer: PeerId, kind: SpanState) -> Iterator[Slice]:
        """Yield the slices that a member says are loading, ready or draining."""
        return spans_of(self.states[peer], self.layers, kind)

    def holds(self, piece: Slice, *kinds: SpanState) -> bool:
        """Return whether all layers of a member's slice lie in its spans of these kinds."""
        spans = [span for kind in kinds for span in self.spans(piece.peer, kind)]
        reached = piece.start
        for span in sorted(spans, key=lambda span: span.start):
            if span.start <= reached:
                reached = max(reached, span.end)
        return reached >= piece.end

    def moves(self, peer: PeerId) -> bool:
        """Return whether a member is on the way from one slice to another."""
        metrics = self.states[peer].metrics
        return metrics is not None and any(span.state != "ready" for span in metrics.spans)


def assignment_of(layers: int, slices: Sequence[Slice], region_of: Mapping[PeerId, str]) -> Assignment:
    """Slices, one a peer at most, as the pipelines that they line up to, the others as spares.

    Where several could come next, it is the first of the same region, so slices in order of the pipelines
    that they were placed in come out as those again. As long as no pipeline is complete, every slice counts
    as part of one, for the next placement to keep what it can.
    """
    waiting: defaultdict[int, defaultdict[str, deque[Slice]]] = defaultdict(lambda: defaultdict(deque))
    for piece in slices:
        waiting[piece.start][region_of[piece.peer]].append(piece)
    pipelines: list[Pipeline] = []
    for first in [piece for piece in slices if piece.start == 0]:
        path = [first]
        while path and path[-1].end < layers:
            following = _next(waiting[path[-1].end], region_of[path[-1].peer])
            if following is None:
                path.pop()  # nothing lines up behind it, now or later
            else:
                path.append(following)
        if path:
            regions = tuple(sorted({region_of[piece.peer] for piece in path}))
            pipelines.append(Pipeline(regions, tuple(path)))
    if not pipelines:
        return Assignment(tuple(Pipeline((region_of[piece.peer],), (piece,)) for piece in slices))
    placed = {piece.peer for pipeline in pipelines for piece in pipeline.slices}
    return Assignment(tuple(pipelines), tuple(piece for piece in slices if piece.peer not in placed))


def _next(waiting: Mapping[str, deque[Slice]], region: str) -> Slice | None:
    """Take out the first of these, of the region if there is one."""
    for pieces in (waiting.get(region), *waiting.values()):
        if pieces:
            return pieces.popleft()
    return None
