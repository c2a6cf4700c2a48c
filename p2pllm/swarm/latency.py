"""ρ between any two peers, from what each has measured and published.

Pure. A pair that nobody measured gets the median of its pair of regions, and a pair of regions in which
nobody measured anything gets a figure typical for the same or for different places.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
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


class Latencies:
    """Tells a mesh, one peer's newest record at a time, what follows for ρ."""

    def __init__(self, mesh: Mesh) -> None:
        """``mesh`` starts as ``UNMEASURED``."""
        self._mesh = mesh
        self._region: dict[PeerId, str] = {}
        self._peer_of: dict[str, PeerId] = {}  # by the prefix of its id
        self._said: dict[PeerId, dict[str, float]] = {}  # what a peer measured, by prefix
        self._observers: defaultdict[str, set[PeerId]] = defaultdict(set)  # who measured a prefix
        self._values: defaultdict[tuple[str, str], list[float]] = defaultdict(list)  # ascending

    def put(self, state: PeerState) -> None:
        """Take in what a peer says now, in place of what it said before."""
        peer, region = state.peer, state.body.region
        if self._region.get(peer) != region:
            self.drop(peer)
            self._region[peer] = region
            self._peer_of[peer[:PREFIX]] = peer
            self._mesh.place(peer, region)
            for observer in self._observers.get(peer[:PREFIX], ()):
                self._link(observer, peer[:PREFIX])
        before = self._said.setdefault(peer, {})
        said = dict(state.metrics.rho) if state.metrics is not None else {}
        for prefix in [prefix for prefix in before if before[prefix] != said.get(prefix)]:
            self._unsay(peer, prefix)
        for prefix in said.keys() - before.keys():
            before[prefix] = said[prefix]
            self._observers[prefix].add(peer)
            self._link(peer, prefix)

    def drop(self, peer: PeerId) -> None:
        """Forget where a peer is and what it measured; what others measured of it waits for its return."""
        if peer not in self._region:
            return
        for prefix in list(self._said[peer]):
            self._unsay(peer, prefix)
        for observer in self._observers.get(peer[:PREFIX], ()):
            self._unlink(observer, peer[:PREFIX])
        del self._said[peer], self._region[peer], self._peer_of[peer[:PREFIX]]
        self._mesh.place(peer, None)

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
        insort(self._values[self._regions(observer, other)], seconds)
        self._tell_median(self._regions(observer, other))

    def _unlink(self, observer: PeerId, prefix: str) -> None:
        other = self._peer_of.get(prefix, observer)
        if other == observer:
            return
        self._mesh.unmeasure(observer, other)
        values = self._values[self._regions(observer, other)]
        del values[bisect_left(values, self._said[observer][prefix])]
        self._tell_median(self._regions(observer, other))

    def _tell_median(self, regions: tuple[str, str]) -> None:
        values = self._values[regions]
        if values:
            middle = len(values) // 2
            self._mesh.typical(*regions, (values[middle] + values[~middle]) / 2)
        else:
            self._mesh.untypical(*regions)
            del self._values[regions]

    def _regions(self, one: PeerId, other: PeerId) -> tuple[str, str]:
        first, second = sorted((self._region[one], self._region[other]))
        return first, second
