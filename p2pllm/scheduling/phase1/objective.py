"""What makes one placement better than another (Eq 2)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from p2pllm.scheduling.network import Network
from p2pllm.scheduling.types import Offer, Pipeline

__all__ = ["Goal", "Objective", "Scores", "Terms", "throughput", "throughput_bounds", "token_s"]

Objective: TypeAlias = Literal["linear", "ratio", "throughput"]


@dataclass(frozen=True, slots=True)
class Goal:
    """What Phase 1 maximises, and figures (s) that stand in for what it would estimate."""

    objective: Objective = "linear"
    alpha: float = 1.0
    r_rtt_s: float | None = None
    t_comp_s: float | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """One placement by all three objectives; ``throughput`` in tokens/s."""

    linear: float
    ratio: float
    throughput: float


@dataclass(frozen=True, slots=True)
class Terms:
    """The two times of Eq 2 (s) and the exponent of its ratio form."""

    r_rtt_s: float
    t_comp_s: float
    alpha: float

    @classmethod
    def of(cls, layers: int, offers: Sequence[Offer], network: Network, goal: Goal) -> Terms:
        """The goal's own figures, and estimates where it names none."""
        r_rtt_s, t_comp_s = goal.r_rtt_s, goal.t_comp_s
        if r_rtt_s is None:
            r_rtt_s = _mean_hop(offers, network)
        if t_comp_s is None:
            t_comp_s = sum(layers * offer.layer_s + offer.head_s for offer in offers) / len(offers)
        return cls(r_rtt_s, t_comp_s, goal.alpha)

    def linear(self, replicas: int, stages: float) -> float:
        """Z(k) = k - (s/k · r_RTT) / T_comp."""
        return replicas - stages / replicas * self.r_rtt_s / self.t_comp_s

    def ratio(self, replicas: int, stages: float) -> float:
        """Z(k) = k^α / (T_comp + s/k · r_RTT)."""
        if stages == math.inf:
            return -math.inf
        return float(replicas**self.alpha) / (self.t_comp_s + stages / replicas * self.r_rtt_s)


def throughput(pipelines: Sequence[Pipeline], offers: dict[str, Offer], network: Network) -> float:
    """Tokens/s when each pipeline serves one session: a token takes all stages and all hops of the ring."""
    return sum(1.0 / token_s(pipeline, offers, network) for pipeline in pipelines)


def token_s(pipeline: Pipeline, offers: dict[str, Offer], network: Network) -> float:
    """Seconds that a token takes once around a pipeline; infinite where two stages cannot reach each
    other.
    """
    slices = pipeline.slices
    work = sum((part.end - part.start) * offers[part.peer].layer_s for part in slices)
    hops = [
        network(one.peer, other.peer) for one, other in zip(slices, [*slices[1:], slices[0]], strict=True)
    ]
    ring = sum(math.inf if hop is None else hop for hop in hops)
    return work + offers[slices[-1].peer].head_s + ring


def throughput_bounds(layers: int, offers: Sequence[Offer], most: int) -> list[float]:
    """No placement of k replicas exceeds these tokens/s, for k from 0 to ``most``.

    j pipelines take at least as long, all together, as the fastest peers would for j times the layers. Given
    that, they do most when each takes just what it adds to that sum.
    """
    fastest = sorted(offers, key=lambda offer: offer.layer_s)
    room = np.array([min(offer.capacity.middle, layers) for offer in fastest])
    pace = np.array([offer.layer_s for offer in fastest])
    held, taken = np.cumsum([0, *room]), np.cumsum([0.0, *room * pace])
    work = np.interp(layers * np.arange(most + 1), held, taken)
    head_s = min(offer.head_s for offer in offers)
    return [0.0, *np.cumsum(1.0 / (np.diff(work) + head_s)).tolist()]


def _mean_hop(offers: Sequence[Offer], network: Network) -> float:
    """Mean one-way ρ (s) over ordered pairs of peers of one region; 0 when there is none."""
    region_of = {offer.peer: offer.region for offer in offers}
    total, pairs = 0.0, 0
    measured: Counter[str] = Counter()
    for one, other in network.measured:
        region = region_of.get(one)
        if one == other or region is None or region_of.get(other) != region:
            continue
        ways = [(one, other)] if (other, one) in network.measured else [(one, other), (other, one)]
        for way in ways:
            measured[region] += 1
            seconds = network(*way)
            if seconds is not None:
                total, pairs = total + seconds, pairs + 1
    for region, count in Counter(region_of.values()).items():
        typical = network.typical(region, region)
        if typical is not None:
            rest = count * (count - 1) - measured[region]
            total, pairs = total + rest * typical, pairs + rest
    return total / pairs if pairs else 0.0
