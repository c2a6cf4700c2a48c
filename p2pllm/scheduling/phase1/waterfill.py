"""Water-filling: how many layers each stage of a pipeline takes (Eq 4).

Every stage gets x_i = min(c_i, λF_i) layers, at least one, with Σ x_i = L: a common level λ up to which all
stages fill like vessels of width F_i. The sum is piecewise linear in λ and bends only where a stage starts to
rise above one layer or reaches its cap, so λ follows in closed form from the sorted bends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from p2pllm.errors import ModelError

__all__ = ["fill"]

MOST_HEAD = 1e9
"""Layers that a head counts for at most: a longer one would drown the layers themselves in rounding."""


def fill(
    layers: int, capacities: Sequence[int], speeds: Sequence[float], *, head_layers: float = 0.0
) -> list[int]:
    """Return the layers of each stage, in the order given, summing to ``layers``.

    ``capacities`` are the layers that fit on each stage at its place in the pipeline (ends already allowed
    for), ``speeds`` its layers per second in any common unit, ``head_layers`` what the LM head costs the last
    stage, counted in layers. Integers come by largest remainder after the caps; equal remainders go to the
    earlier stage.

    Raises ModelError when the stages cannot hold the model or outnumber its layers, ValueError for other
    nonsense.
    """
    if len(capacities) != len(speeds) or not all(0 < speed < math.inf for speed in speeds):
        raise ValueError("every stage needs a capacity and a finite speed above zero")
    room = sum(capacities)
    if room < layers:
        raise ModelError(
            f"the model has {layers} layers but only {room} fit on these peers: add a peer or memory"
        )
    if len(capacities) > layers or min(capacities, default=1) < 1:
        raise ModelError(
            f"not every one of {len(capacities)} peers can take a layer of {layers}: use fewer peers"
        )
    already = [0.0] * (len(speeds) - 1) + [min(head_layers, MOST_HEAD)]
    shares = _shares(layers, capacities, speeds, already)
    counts = [math.floor(share) for share in shares]
    # A stage at its cap has no remainder, so rounding up never overfills one.
    # Rounded, for equal remainders may come by different sums.
    by_remainder = sorted(range(len(counts)), key=lambda i: round(counts[i] - shares[i], 6))
    for i in by_remainder[: layers - sum(counts)]:
        counts[i] += 1
    return counts


def _shares(
    layers: int, capacities: Sequence[int], speeds: Sequence[float], already: Sequence[float]
) -> list[float]:
    """Return the real x_i at the level where they sum to ``layers``; ``already`` is work beside layers."""

    def at(level: float) -> list[float]:
        return [
            min(cap, max(1.0, level * speed - load))
            for cap, speed, load in zip(capacities, speeds, already, strict=True)
        ]

    stages = list(zip(capacities, speeds, already, strict=True))
    rises = {(1 + load) / speed for _, speed, load in stages}
    caps = {(cap + load) / speed for cap, speed, load in stages}
    low, below = 0.0, float(len(stages))
    for high in sorted(rises | caps):
        above = sum(at(high))
        if above > layers:
            # Between two bends the sum is linear.
            return at(low + (high - low) * (layers - below) / (above - below))
        low, below = high, above
    # Never above: the model fills every stage.
    return [float(cap) for cap in capacities]
