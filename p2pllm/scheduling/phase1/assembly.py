"""From patterns of kinds to pipelines of peers, moving as little as possible from what peers hold today."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from p2pllm.scheduling.network import Network
from p2pllm.scheduling.phase1.arrange import arrange, overlap
from p2pllm.scheduling.phase1.patterns import Kinds, Pattern
from p2pllm.scheduling.types import Offer, PeerId, Pipeline, Slice

__all__ = ["assemble", "still_serves"]


def assemble(
    kinds: Kinds,
    patterns: Sequence[Pattern],
    offers: Sequence[Offer],
    network: Network,
    today: Sequence[Pipeline],
) -> list[Pipeline]:
    """One pipeline per pattern, made of ``offers``.

    Pipelines of ``today`` that match a pattern stay as they are. For the others peers come by greatest
    overlap of what they hold with what their pipeline still lacks, then the fastest.
    """
    wanted = Counter(patterns)
    free: dict[int, list[Offer]] = defaultdict(list)
    kind_of = kinds.by_capacity(offer.capacity for offer in offers)
    for offer in sorted(offers, key=lambda offer: (offer.layer_s, offer.peer), reverse=True):
        if offer.capacity in kind_of:
            free[kind_of[offer.capacity]].append(offer)
    pipelines = _kept(kinds, wanted, free, today)
    held = {part.peer: part for pipeline in today for part in pipeline.slices}
    for pattern, number in sorted(wanted.items()):
        for _ in range(number):
            members = _members(kinds, pattern, free, held)
            pipelines.append(arrange(kinds.layers, members, network, held))
    return pipelines


def still_serves(layers: int, pipeline: Pipeline, offers: Mapping[PeerId, Offer]) -> bool:
    """Whether the peers of a pipeline are all there and can hold what they held."""
    reached = 0
    for part in pipeline.slices:
        offer = offers.get(part.peer)
        if offer is None or part.start != reached or not offer.capacity.holds(part.start, part.end, layers):
            return False
        reached = part.end
    return reached == layers


def _kept(
    kinds: Kinds, wanted: Counter[Pattern], free: dict[int, list[Offer]], today: Sequence[Pipeline]
) -> list[Pipeline]:
    """Take pipelines of today out of what is wanted, and their peers out of what is free."""
    if not today:
        return []
    kind_of = {offer.peer: kind for kind, some in free.items() for offer in some}
    offers = {offer.peer: offer for some in free.values() for offer in some}
    kept: list[Pipeline] = []
    for pipeline in today:
        if still_serves(kinds.layers, pipeline, offers):
            pattern = tuple(sorted(kind_of[part.peer] for part in pipeline.slices))
            if wanted[pattern] > 0:
                wanted[pattern] -= 1
                for part in pipeline.slices:
                    free[kind_of[part.peer]].remove(offers.pop(part.peer))
                kept.append(pipeline)
    return kept


def _members(
    kinds: Kinds, pattern: Pattern, free: dict[int, list[Offer]], held: Mapping[PeerId, Slice]
) -> list[Offer]:
    """Take a peer of each kind of the pattern out of the free ones."""
    if not held:
        return [free[kind].pop() for kind in pattern]
    members: list[Offer] = []
    gaps = [Slice("", 0, kinds.layers)]
    for kind in pattern:
        some = free[kind]
        # The list ends with the fastest; of equal overlaps the last one is taken.
        gain, _, best = max(
            (sum(overlap(Slice(o.peer, gap.start, gap.end), held) for gap in gaps), i, o)
            for i, o in enumerate(some)
        )
        some.remove(best)
        members.append(best)
        if gain:
            gaps = _without(gaps, held[best.peer])
    return members


def _without(gaps: Sequence[Slice], held: Slice) -> list[Slice]:
    """What is left of the gaps beside a slice."""
    pieces = (
        Slice("", start, end)
        for gap in gaps
        for start, end in ((gap.start, min(gap.end, held.start)), (max(gap.start, held.end), gap.end))
    )
    return [piece for piece in pieces if piece.start < piece.end]
