"""How many replicas each region gets: s*(k) from the regions' own s*, by min-plus convolution."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from p2pllm.scheduling.network import Network
from p2pllm.scheduling.phase1.assembly import assemble
from p2pllm.scheduling.phase1.packing import Packing
from p2pllm.scheduling.types import Capacity, Offer, Pipeline

__all__ = ["Sharing"]

_Floats: TypeAlias = npt.NDArray[np.float64]
_Ints: TypeAlias = npt.NDArray[np.intp]


class Sharing:
    """Offers by region, each region packed by itself.

    Shares are counted down from the most that each region could have, so that a number of replicas near the
    top needs little of the convolution.
    """

    def __init__(self, layers: int, offers: Sequence[Offer], *, effort: int) -> None:
        regions: dict[str, list[Offer]] = defaultdict(list)
        for offer in offers:
            regions[offer.region].append(offer)
        self.regions = dict(sorted(regions.items()))
        self._packings: list[Packing] = []
        hints: set[tuple[Capacity, ...]] = set()
        for some in self.regions.values():
            capacities = [offer.capacity for offer in some]
            packing = Packing(layers, capacities, effort=effort, hints=sorted(hints))
            self._packings.append(packing)
            hints.update(packing.used)

    @property
    def most(self) -> int:
        """More replicas than this are proven impossible."""
        return sum(packing.most for packing in self._packings)

    def bounds(self) -> _Floats:
        """Lower bounds on s*(k) for k from 0 to `most`, [most + 1]."""
        return self._combine(self.most)[0][::-1]

    def solve(self, replicas: int) -> tuple[float, float, list[int]]:
        """(stages found, lower bound, replicas of each region) for ``replicas``; infinite if impossible.

        Only the shares that are best by the bounds are solved for, until solving no longer raises a bound.
        """
        while replicas <= self.most:
            bound, shares = self._best(replicas)
            if bound == math.inf:
                break
            pairs = list(zip(self._packings, shares, strict=True))
            for packing, share in pairs:
                packing.solve(share)
            possible = all(share <= packing.most for packing, share in pairs)
            if possible and bound == sum(packing.lower[share] for packing, share in pairs):
                return sum(packing.stages(share) for packing, share in pairs), bound, shares
        return math.inf, math.inf, []

    def build(self, shares: Sequence[int], network: Network, today: Sequence[Pipeline]) -> list[Pipeline]:
        """The pipelines for so many replicas in each region, which `solve` has found."""
        return [
            pipeline
            for packing, share, offers in zip(self._packings, shares, self.regions.values(), strict=True)
            for pipeline in assemble(packing.kinds, packing.found[share], offers, network, today)
        ]

    def _best(self, replicas: int) -> tuple[float, list[int]]:
        """The least lower bound for ``replicas`` and the shares that have it."""
        missing = self.most - replicas
        total, choices = self._combine(missing)
        shares: list[int] = []
        left = missing
        for packing, choice in zip(reversed(self._packings), reversed(choices), strict=True):
            given_up = int(choice[left])
            shares.append(packing.most - given_up)
            left -= given_up
        return float(total[missing]), shares[::-1]

    def _combine(self, missing: int) -> tuple[_Floats, list[_Ints]]:
        """Fewest stages if up to ``missing`` replicas are given up, [missing + 1], and for each region how
        many of them it gives up.
        """
        total = np.zeros(1)
        choices: list[_Ints] = []
        for packing in self._packings:
            own = packing.lower[::-1][: missing + 1]
            length = min(len(total) + len(own) - 1, missing + 1)
            sums = np.full(length, math.inf)
            choice = np.zeros(length, dtype=np.intp)
            for given_up, stages in enumerate(own.tolist()):
                part = total[: length - given_up] + stages
                span = slice(given_up, given_up + len(part))
                better = part < sums[span]
                np.copyto(sums[span], part, where=better)
                choice[span][better] = given_up
            total = sums
            choices.append(choice)
        return total, choices
