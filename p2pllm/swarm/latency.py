"""ρ between any two peers, from what each has measured and published.

Pure. A pair that nobody measured gets the median of its pair of regions, and a pair of regions in which
nobody measured anything gets a figure typical for the same or for different places.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterable

from p2pllm.scheduling import Mesh, Network, PeerId
from p2pllm.swarm.view import PeerState

__all__ = ["PREFIX", "UNMEASURED", "Latencies", "latency_of"]

PREFIX = 16
"""Hex digits of a peer id that a metrics record carries beside each ρ."""

UNMEASURED = Network(same_region_s=0.001, cross_region_s=0.05)
"""What is typical until somebody has measured something."""


def latency_of(peers: Iterable[PeerState]) -> Network:
    """One-way latency (s) from peer to peer."""
    mesh = Mesh(UNMEASURED)
    latencies = Latencies(mesh)
    for state in peers:
        latencies.put(state)
    return mesh.network()


MAX_REGIONS = 64
"""Regions at most: anybody can make up names, and a search looks at every pair of regions."""

ELSEWHERE = ""
"""One of them: the region of all peers that came when there was none left."""


class Latencies:
    """Tells a mesh, one peer's newest record at a time, what follows for ρ."""

    def __init__(self, mesh: Mesh) -> None:
        """``mesh`` starts as ``UNMEASURED``."""
        self._mesh = mesh
        self._region: dict[PeerId, str] = {}  # where a peer counts
        self._members = Counter([ELSEWHERE])  # by region, of those that have any; this one always has
        self._peer_of: dict[str, PeerId] = {}  # by the prefix of its id
        self._said: dict[PeerId, dict[str, float]] = {}  # what a peer measured, by prefix
        self._observers: defaultdict[str, set[PeerId]] = defaultdict(set)  # who measured a prefix
        self._values: defaultdict[tuple[str, str], list[float]] = defaultdict(list)  # ascending
        self._changed: set[tuple[str, str]] = set()  # whose values are not those that the mesh knows

    def put(self, state: PeerState) -> None:
        """Take in what a peer says now, in place of what it said before."""
        peer, region = state.peer, self._counted(state.body.region)
        if self._region.get(peer) != region:
            self._forget(peer)
            self._place(peer, region)
        before = self._said[peer]
        said = dict(state.metrics.rho) if state.metrics is not None else {}
        for prefix in before.keys() - said.keys():
            self._unsay(peer, prefix)
        for prefix, seconds in said.items():
            if before.get(prefix) != seconds:
                self._say(peer, prefix, seconds)
        self._tell_medians()

    def drop(self, peer: PeerId) -> None:
        """Forget where a peer is and what it measured; what others measured of it waits for its return."""
        self._forget(peer)
        self._tell_medians()

    def _counted(self, region: str) -> str:
        is_own = region in self._members or len(self._members) < MAX_REGIONS
        return region if is_own else ELSEWHERE

    def _place(self, peer: PeerId, region: str) -> None:
        self._region[peer] = region
        self._members[region] += 1
        self._said[peer] = {}
        self._mesh.place(peer, region)
        # Two ids with one prefix can be made, at some expense: it stays with the first.
        if self._peer_of.setdefault(peer[:PREFIX], peer) == peer:
            for observer in self._observers.get(peer[:PREFIX], ()):
                self._link(observer, peer[:PREFIX])

    def _forget(self, peer: PeerId) -> None:
        if peer not in self._region:
            return
        for prefix in list(self._said[peer]):
            self._unsay(peer, prefix)
        if self._peer_of.get(peer[:PREFIX]) == peer:
            for observer in self._observers.get(peer[:PREFIX], ()):
                self._unlink(observer, peer[:PREFIX])
            del self._peer_of[peer[:PREFIX]]
        region = self._region.pop(peer)
        self._members[region] -= 1
        if not self._members[region]:
            del self._members[region]
        del self._said[peer]
        self._mesh.place(peer, None)

    def _say(self, observer: PeerId, prefix: str, seconds: float) -> None:
        if prefix in self._said[observer]:
            self._discount(observer, prefix)
        self._said[observer][prefix] = seconds
        self._observers[prefix].add(observer)
        self._link(observer, prefix)

    def _unsay(self, observer: PeerId, prefix: str) -> None:
        self._unlink(observer, prefix)
        del self._said[observer][prefix]
        self._observers[prefix].remove(observer)
        if not self._observers[prefix]:
            del self._observers[prefix]

    def _link(self, observer: PeerId, prefix: str) -> None:
        """Let a measurement count, if it is known whose prefix that is."""
        other = self._peer_of.get(prefix, observer)
        if other == observer:
            return
        seconds = self._said[observer][prefix]
        self._mesh.measure(observer, other, seconds)
        regions = self._regions(observer, other)
        insort(self._values[regions], seconds)
        self._changed.add(regions)

    def _unlink(self, observer: PeerId, prefix: str) -> None:
        self._discount(observer, prefix)
        self._mesh.unmeasure(observer, self._peer_of.get(prefix, observer))

    def _discount(self, observer: PeerId, prefix: str) -> None:
        """Take a measurement out of the values of its regions, if it counts."""
        other = self._peer_of.get(prefix, observer)
        if other == observer:
            return
        regions = self._regions(observer, other)
        values = self._values[regions]
        del values[bisect_left(values, self._said[observer][prefix])]
        self._changed.add(regions)

    def _tell_medians(self) -> None:
        for regions in self._changed:
            values = self._values[regions]
            if values:
                middle = len(values) // 2
                self._mesh.typical(*regions, (values[middle] + values[~middle]) / 2)
            else:
                self._mesh.untypical(*regions)
                del self._values[regions]
        self._changed.clear()

    def _regions(self, one: PeerId, other: PeerId) -> tuple[str, str]:
        first, second = sorted((self._region[one], self._region[other]))
        return first, second
