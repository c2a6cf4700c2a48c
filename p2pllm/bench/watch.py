"""What one member sees and does while the bench watches it."""

from __future__ import annotations

import time
from dataclasses import astuple

from p2pllm.bench.member import Member
from p2pllm.bench.samples import Samples, Sighting
from p2pllm.bench.wires import Traffic
from p2pllm.identity import PeerId

__all__ = ["Watch"]


class Watch:
    """Notes when a member sees which event, and what its counters grow by, from now on until `end`."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._view = member.swarm.view
        self._version, _ = self._view.news(0)
        self._last: dict[PeerId, int] = {}
        self._sightings: list[Sighting] = []
        self._puts = len(member.puts)
        self._traffic = astuple(member.wires.traffic)
        member.on_news = self._look

    def end(self, samples: Samples) -> None:
        """Stop watching, and add what was seen."""
        member = self._member
        member.on_news = lambda: None
        samples.sightings[member.id] = self._sightings
        samples.puts += member.puts[self._puts :]
        counters = zip(astuple(samples.traffic), astuple(member.wires.traffic), self._traffic, strict=True)
        samples.traffic = Traffic(*(total + now - before for total, now, before in counters))

    def _look(self) -> None:
        now = time.monotonic()
        self._version, changed = self._view.news(self._version)
        for peer in changed:
            state = self._view.peer(peer, now)
            if state is not None and state.metrics is not None:
                running = state.metrics.running
                if running > self._last.get(peer, 0):
                    self._last[peer] = running
                    self._sightings.append((peer, running, now))
