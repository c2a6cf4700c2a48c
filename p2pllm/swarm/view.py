"""A peer's local snapshot of all live records of its swarm.

Pure: records and times go in, typed values come out. Liveness is judged by the local receipt of a record with
a newer sequence number, never by a remote clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Generic, TypeVar

from p2pllm.records import MetricsBody, PeerBody, Record
from p2pllm.scheduling import Holder, PeerId

__all__ = ["GONE_S", "PeerState", "View"]

_Body = TypeVar("_Body")

GONE_S = 6.0
"""Without a metrics record for this long a peer is out of the view."""

JOIN_S = 30.0
"""How long a peer that has published its description but no metrics yet (it is starting) is listed."""

MAX_PEERS = 4096
"""Ids that are kept at most: anybody can make new ones."""

REMEMBER_S = 600.0
"""How long sequence numbers of silent peers are kept, so that no late copy of an old record revives them."""


@dataclass(frozen=True, slots=True)
class PeerState:
    """What one peer last said of itself."""

    peer: PeerId
    body: PeerBody
    metrics: MetricsBody | None
    age_s: float
    """Seconds since the last news of this peer arrived here."""
    heard_s: float = math.inf
    """When it arrived, by the local clock."""

    @property
    def ready(self) -> bool:
        """Holds at least one slice that takes new sessions."""
        return (
            not self.body.leaving
            and self.metrics is not None
            and any(span.state == "ready" for span in self.metrics.spans)
        )

    def holders(self) -> Iterator[Holder]:
        """The ready spans of this peer as vertices for Phase 2."""
        if self.metrics is None or self.body.leaving:
            return
        for span in self.metrics.spans:
            if span.state == "ready":
                yield Holder(
                    peer=self.peer,
                    start=span.start,
                    end=span.end,
                    layer_s=self.metrics.layer_s,
                    head_s=self.metrics.head_s,
                    wait_s=self.metrics.wait_s,
                    kv_blocks=self.metrics.free_kv_blocks,
                    heard_s=self.heard_s,
                )


@dataclass(frozen=True, slots=True)
class _Heard(Generic[_Body]):
    """The newest record of one kind of one peer."""

    seq: int
    body: _Body
    at: float


class View:
    """The newest records of each peer of one swarm."""

    def __init__(self, swarm: bytes) -> None:
        self._swarm = swarm
        self._bodies: dict[PeerId, _Heard[PeerBody]] = {}
        self._metrics: dict[PeerId, _Heard[MetricsBody]] = {}
        self._present: frozenset[PeerId] = frozenset()
        self._version = 0
        self._changed: dict[PeerId, int] = {}  # the version that a peer's last record made, ascending

    def apply(self, record: Record, now: float) -> bool:
        """Take in a verified record received at local time ``now`` (s); True if it was news."""
        if record.swarm != self._swarm:
            return False
        match record.body:
            case PeerBody():
                is_news = _hear(self._bodies, record, record.body, now)
            case MetricsBody():
                is_news = _hear(self._metrics, record, record.body, now)
            case _:
                is_news = False
        if is_news:
            self._version += 1
            self._changed.pop(record.peer_id, None)
            self._changed[record.peer_id] = self._version
        return is_news

    def news(self, version: int) -> tuple[int, list[PeerId]]:
        """(version now, peers with records that arrived since ``version``, newest first); 0 for all."""
        newest_first = reversed(self._changed.items())
        return self._version, [peer for peer, _ in takewhile(lambda item: item[1] > version, newest_first)]

    def changes(self, now: float) -> tuple[frozenset[PeerId], frozenset[PeerId]]:
        """(arrived, gone) since the last call; also forgets peers that have long been silent."""
        present = frozenset(peer for peer in self._bodies if self._alive(peer, now))
        arrived, gone = present - self._present, self._present - present
        self._present = present
        for table in (self._bodies, self._metrics):
            for peer in [peer for peer, heard in table.items() if now - heard.at > REMEMBER_S]:
                del table[peer]
        for peer in self._changed.keys() - self._bodies.keys() - self._metrics.keys():
            del self._changed[peer]
        return arrived, gone

    def peers(self, now: float) -> tuple[PeerState, ...]:
        """All live peers, by id."""
        return tuple(state for peer in sorted(self._bodies) if (state := self.peer(peer, now)) is not None)

    def peer(self, peer: PeerId, now: float) -> PeerState | None:
        """One live peer, or None."""
        if peer not in self._bodies or not self._alive(peer, now):
            return None
        body, metrics = self._bodies[peer], self._metrics.get(peer)
        if metrics is None:
            return PeerState(peer, body.body, None, now - body.at, body.at)
        return PeerState(peer, body.body, metrics.body, now - metrics.at, metrics.at)

    def seq(self, peer: PeerId) -> int:
        """The highest sequence number seen from ``peer`` (0: none)."""
        heard = (self._bodies.get(peer), self._metrics.get(peer))
        return max((entry.seq for entry in heard if entry is not None), default=0)

    def _alive(self, peer: PeerId, now: float) -> bool:
        metrics = self._metrics.get(peer)
        if metrics is None:
            return now - self._bodies[peer].at <= JOIN_S
        return now - metrics.at <= GONE_S


def _hear(table: dict[PeerId, _Heard[_Body]], record: Record, body: _Body, now: float) -> bool:
    known = table.get(record.peer_id)
    if known is not None and known.seq >= record.seq:
        return False
    if known is None and len(table) >= MAX_PEERS:
        return False
    table[record.peer_id] = _Heard(record.seq, body, now)
    return True
