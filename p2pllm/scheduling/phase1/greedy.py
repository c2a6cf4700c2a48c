"""A first packing, quick and often good: patterns that can be used together, of few members each."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from p2pllm.scheduling.phase1.patterns import Kinds, Pattern

__all__ = ["pack_greedily"]


def pack_greedily(kinds: Kinds, peers: Sequence[int]) -> dict[Pattern, int]:
    """Patterns and how often each is used, out of so many ``peers`` of each kind.

    The largest peer left is joined by the smallest that completes a pipeline with it; where no single one
    does, by the largest, and so on.
    """
    counts = list(peers)
    found: dict[Pattern, int] = {}
    while True:
        left = [kind for kind, count in enumerate(counts) if count]
        pattern: Pattern = ()
        while left and not kinds.complete(pattern):
            # From the largest kind to the smallest; those that still complete the pattern come first.
            enough = bisect_left(left, True, key=lambda kind: not kinds.complete((*pattern, kind)))
            chosen = left[max(0, enough - 1)] if pattern else left[0]
            pattern = tuple(sorted((*pattern, chosen)))
            left = [kind for kind in left if pattern.count(kind) < counts[kind]]
        if not kinds.complete(pattern):
            return found
        times = min(counts[kind] // pattern.count(kind) for kind in pattern)
        found[pattern] = found.get(pattern, 0) + times
        for kind in pattern:
            counts[kind] -= times
