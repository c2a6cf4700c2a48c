"""A network that changes one pair at a time, kept in arrays from which a search takes what it needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from p2pllm.scheduling.network import Network
from p2pllm.scheduling.phase2.hops import DenseHops, Floats, Hops, Ints, Pairs, RegionHops
from p2pllm.scheduling.types import PeerId

__all__ = ["Mesh"]

_Scalar = TypeVar("_Scalar", bound=np.generic)

_SMALL = 64
"""So few peers are searched fastest through the whole matrix of their ρ."""

_DENSE = 0.5
"""Likewise more peers, where this share of all pairs is measured."""

_NOWHERE = 0
"""The number of the region of peers that have none, from which only measured pairs lead away."""


class Mesh:
    """ρ between peers under the rules of ``Network``, as a thing that changes.

    Peers are numbered from 0 on, regions from 1 on; the number of a dropped peer goes to another.
    """

    def __init__(self, network: Network | None = None) -> None:
        """Start with what ``network`` says; ValueError for ρ that are negative or not a number."""
        network = network or Network()
        self._region_of: dict[PeerId, str] = {}
        self._measured = {pair: _checked(s) for pair, s in network.measured.items() if pair[0] != pair[1]}
        self._regional: dict[tuple[str, str], float | None] = {}
        # The rules stand in Network; this one always sees the newest figures.
        self._network = Network(
            self._region_of,
            self._measured,
            self._regional,
            _checked(network.same_region_s),
            _checked(network.cross_region_s),
        )
        self.version = 0
        """Changes whenever some ρ does."""
        self._numbers: dict[PeerId, int] = {}
        self._names: list[PeerId] = []
        self._free: list[int] = []
        self._regions = np.zeros(0, dtype=np.intp)  # by number of the peer
        self._region_numbers: dict[str, int] = {}
        self._free_regions: list[int] = []
        self._members: Counter[str] = Counter()
        self._typical = np.full((1, 1), np.inf)  # by numbers of the regions
        for peer, region in network.region_of.items():
            self.place(peer, region)
        for (a, b), seconds in network.regional.items():
            self.typical(a, b, seconds)
        seconds_of = {(b, a): s for (a, b), s in self._measured.items()} | self._measured
        self._at = {(self.number(a), self.number(b)): position for position, (a, b) in enumerate(seconds_of)}
        self._ends = np.array(list(self._at), dtype=np.intp).reshape(-1, 2)
        self._seconds = np.array([_seconds(s) for s in seconds_of.values()], dtype=np.float64)

    def network(self) -> Network:
        """Return what holds now, as a value."""
        return Network(
            dict(self._region_of),
            dict(self._measured),
            dict(self._regional),
            self._network.same_region_s,
            self._network.cross_region_s,
        )

    def number(self, peer: PeerId) -> int:
        """Return the number of a peer; a new one gets one, and no region."""
        number = self._numbers.get(peer)
        if number is None:
            number = self._free.pop() if self._free else len(self._names)
            self._numbers[peer] = number
            self._names[number : number + 1] = [peer]
            if number == len(self._regions):
                self._regions = _grown(self._regions)
            self._regions[number] = _NOWHERE
        return number

    def name(self, number: int) -> PeerId:
        """Return the peer of a number."""
        return self._names[number]

    def known(self, peer: PeerId) -> int:
        """Return the number of a peer, -1 when there is no such peer."""
        return self._numbers.get(peer, -1)

    def regions(self, numbers: Ints) -> Ints:
        """Return the numbers of the regions of numbered peers."""
        found: Ints = self._regions[numbers]
        return found

    def place(self, peer: PeerId, region: str | None) -> None:
        """Say in which region a peer is, None for nowhere."""
        number, before = self.number(peer), self._region_of.get(peer)
        if region == before:
            return
        self.version += 1
        if before is not None:
            del self._region_of[peer]
            self._members[before] -= 1
            if not self._members[before]:
                del self._members[before]
                self._free_regions.append(self._region_numbers.pop(before))
        if region is not None:
            self._region_of[peer] = region
            self._members[region] += 1
        self._regions[number] = _NOWHERE if region is None else self._region_number(region)

    def typical(self, a: str, b: str, seconds: float | None) -> None:
        """Say what is typical from region ``a`` to ``b``: for the way back too, unless that is said apart."""
        self._regional[a, b] = _checked(seconds)
        self._compile_typical(a, b)

    def untypical(self, a: str, b: str) -> None:
        """Take back what was said of the way from region ``a`` to ``b``, if anything was."""
        self._regional.pop((a, b), None)
        self._compile_typical(a, b)

    def measure(self, source: PeerId, target: PeerId, seconds: float | None) -> None:
        """Say what was measured from peer to peer: for the way back too, unless that was measured itself.

        ValueError when that is negative or not a number. The way of a peer to itself is not worth a word.
        """
        if source == target:
            return
        self._measured[source, target] = _checked(seconds)
        for pair in ((source, target), (target, source)):
            self._set(self.number(pair[0]), self.number(pair[1]), _seconds(self._network(*pair)))

    def unmeasure(self, source: PeerId, target: PeerId) -> None:
        """Take back what was measured from ``source`` to ``target``, if anything was."""
        if (source, target) not in self._measured:
            return
        del self._measured[source, target]
        back = (target, source) in self._measured
        for pair in ((source, target), (target, source)):
            numbers = self.number(pair[0]), self.number(pair[1])
            if back:
                self._set(*numbers, _seconds(self._network(*pair)))
            else:
                self._unset(*numbers)

    def drop(self, peer: PeerId) -> None:
        """Forget a peer, its region and all pairs it is in."""
        number = self.known(peer)
        if number < 0:
            return
        self.place(peer, None)
        ends = self._ends[: len(self._at)]
        for source, target in ends[np.flatnonzero(ends == number) // 2].tolist():
            self._measured.pop((self._names[source], self._names[target]), None)
            self._unset(source, target)
        del self._numbers[peer]
        self._free.append(number)

    def way(self, peer: PeerId, numbers: Ints, *, back: bool = False) -> Floats:
        """Return ρ from ``peer`` to each of the numbered peers, or ``back`` from each, [P]; inf: no edge."""
        number = self.known(peer)
        if number < 0:
            return np.full(len(numbers), np.inf)
        typical = self._typical.T if back else self._typical
        seconds = typical[self._regions[number]].take(self._regions)
        near, far = (1, 0) if back else (0, 1)
        ends = self._ends[: len(self._at)]
        measured = np.flatnonzero(ends[:, near] == number)
        seconds[ends[measured, far]] = self._seconds[measured]
        seconds[number] = 0.0
        found: Floats = seconds[numbers]
        return found

    def hops(self, numbers: Ints, severed: Iterable[tuple[PeerId, PeerId]] = ()) -> Hops:
        """Return ρ among the numbered peers, which come region by region, with ``severed`` hops taken out."""
        position = np.full(len(self._regions) + 1, -1)  # the last is where unknown peers look
        position[numbers] = np.arange(len(numbers))
        source, target = position[self._ends[: len(self._at)].T]
        seconds = self._seconds[: len(self._at)]
        for a, b in severed:
            ends = position[self.known(a)], position[self.known(b)]
            kept = (source != ends[0]) | (target != ends[1])
            source, target = np.append(source[kept], ends[0]), np.append(target[kept], ends[1])
            seconds = np.append(seconds[kept], np.inf)
        inside = (source >= 0) & (target >= 0)
        pairs = Pairs(source[inside], target[inside], seconds[inside])
        region_of = self._regions[numbers]
        is_next = np.diff(region_of, prepend=-1) != 0
        present, region = region_of[is_next], np.cumsum(is_next) - 1
        typical = self._typical[np.ix_(present, present)]
        share = len(pairs.source) / max(1, len(numbers)) ** 2
        if not share or (len(numbers) > _SMALL and share < _DENSE):
            return RegionHops(typical, region, pairs)
        matrix = typical[np.ix_(region, region)]
        matrix[pairs.source, pairs.target] = pairs.seconds
        np.fill_diagonal(matrix, 0.0)
        return DenseHops(matrix, region)

    def _region_number(self, region: str) -> int:
        number = self._region_numbers.get(region)
        if number is None:
            number = self._free_regions.pop() if self._free_regions else len(self._region_numbers) + 1
            self._region_numbers[region] = number
            while number >= len(self._typical):
                self._typical = np.pad(self._typical, (0, len(self._typical)), constant_values=np.inf)
            for other in self._region_numbers:
                self._compile_typical(region, other)
        return number

    def _compile_typical(self, a: str, b: str) -> None:
        """Bring the matrix up to date for two regions, if both are in use."""
        for one, other in ((a, b), (b, a)):
            numbers = self._region_numbers.get(one, _NOWHERE), self._region_numbers.get(other, _NOWHERE)
            seconds = _seconds(self._network.typical(one, other))
            if _NOWHERE not in numbers and self._typical[numbers] != seconds:
                self._typical[numbers] = seconds
                self.version += 1

    def _set(self, source: int, target: int, seconds: float) -> None:
        count = len(self._at)
        at = self._at.setdefault((source, target), count)
        if at == len(self._seconds):
            self._ends, self._seconds = _grown(self._ends), _grown(self._seconds)
        if at == count or self._seconds[at] != seconds:
            self.version += 1
        self._ends[at] = source, target
        self._seconds[at] = seconds

    def _unset(self, source: int, target: int) -> None:
        """Let the last pair take the place of this one, so that no holes are left."""
        self.version += 1
        at = self._at.pop((source, target))
        last = len(self._at)
        if at != last:
            ends = self._ends[last]
            self._ends[at], self._seconds[at] = ends, self._seconds[last]
            self._at[int(ends[0]), int(ends[1])] = at


def _grown(array: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
    """Return the array with twice as many rows and some, so that growing costs little on average."""
    return np.concatenate((array, np.zeros_like(array), np.zeros((8, *array.shape[1:]), dtype=array.dtype)))


def _checked(seconds: float | None) -> float | None:
    """Return ρ as it is, None for no edge; ValueError when it cannot be one."""
    if seconds is not None and not seconds >= 0:
        raise ValueError(f"a latency must be 0 or more seconds, got {seconds}")
    return seconds


def _seconds(seconds: float | None) -> float:
    return np.inf if seconds is None else seconds
