"""Which layers nobody holds, and which hang on a single peer."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

from p2pllm.scheduling.types import Holder, PeerId

__all__ = ["gaps", "sole_holders", "uncovered"]


def gaps(layers: int, ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return what of ``[0, layers)`` lies in none of the ``ranges`` ``[start, end)``, in order."""
    missing: list[tuple[int, int]] = []
    reached = 0
    for start, end in sorted(ranges):
        if start >= layers:
            break
        if start > reached:
            missing.append((reached, start))
        reached = max(reached, end)
    if reached < layers:
        missing.append((reached, layers))
    return tuple(missing)


def uncovered(layers: int, holders: Iterable[Holder]) -> tuple[tuple[int, int], ...]:
    """Return the ranges within ``[0, layers)`` that no holder covers; leaving holders do not count."""
    return gaps(layers, ((h.start, h.end) for h in holders if not h.leaving))


def sole_holders(layers: int, holders: Iterable[Holder]) -> tuple[tuple[int, int, PeerId], ...]:
    """Return the ranges (start, end, peer) within ``[0, layers)`` that only one peer covers.

    The swarm loses them with that peer. They are as long as can be and in order. Several spans of a peer are
    one holder; leaving ones do not count.
    """
    changes: dict[int, Counter[PeerId]] = {0: Counter(), layers: Counter()}
    for holder in holders:
        start, end = max(holder.start, 0), min(holder.end, layers)
        if start < end and not holder.leaving:
            changes.setdefault(start, Counter())[holder.peer] += 1
            changes.setdefault(end, Counter())[holder.peer] -= 1
    found: list[tuple[int, int, PeerId]] = []
    spans: Counter[PeerId] = Counter()
    for start, end in itertools.pairwise(sorted(changes)):
        for peer, change in changes[start].items():
            spans[peer] += change
            if not spans[peer]:
                del spans[peer]
        if len(spans) != 1:
            continue
        (peer,) = spans
        goes_on = bool(found) and found[-1][1:] == (start, peer)
        found.append((found.pop()[0] if goes_on else start, end, peer))
    return tuple(found)
