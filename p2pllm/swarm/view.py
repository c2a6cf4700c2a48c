"""A peer's local snapshot of all live records of its swarm.

Pure: records and times go in, typed values come out. Liveness is judged by the local receipt of a record with
a newer sequence number and by the life it then has left, never by a remote clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from p2pllm.dht import Digest
from p2pllm.errors import RecordError
from p2pllm.records import MetricsBody, PeerBody, Record, SwarmKey
from p2pllm.scheduling import Holder, PeerId

__all__ = ["GONE_S", "HINT_S", "PeerState", "View"]

GONE_S: Final = 5.5
"""How long a metrics record keeps its peer in the view, counted from when it was published."""

HINT_S: Final = 10.0
"""How much longer than its last record a peer can be kept by digests, which nobody has signed."""

JOIN_S: Final = 30.0
"""How long a peer that has published its description but no metrics yet (it is starting) is listed."""

MAX_PEERS: Final = 4096
"""Ids that are kept at most: anybody can make new ones."""

REMEMBER_S: Final = 600.0
"""How long sequence numbers of silent peers are kept, so that no late copy of an old record revives them."""


@dataclass(frozen=True, slots=True)
class PeerState:
    """What one peer last said of itself."""

    peer: PeerId
    body: PeerBody
    metrics: MetricsBody | None
    heard_s: float = math.inf
    """When the last news of this peer arrived here, by the local clock."""

    @property
    def ready(self) -> bool:
        """Holds at least one slice that takes new sessions."""
        return next(self.holders(), None) is not None

    def holders(self) -> Iterator[Holder]:
        """The spans of this peer that take new sessions, as vertices for Phase 2."""
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


@dataclass(slots=True)
class _Known:
    """What is kept of one peer, times by the local clock."""

    body: PeerBody | None = None
    body_seq: int = 0
    metrics: MetricsBody | None = None
    metrics_seq: int = 0
    heard_s: float = -math.inf
    """The last news, records and hints."""
    until: float = -math.inf
    """Without further news the peer is gone then."""
    signed_until: float = -math.inf
    """The same, hints left out."""
    record_s: float = -math.inf
    """The last record."""
    built: PeerState | None = None
    """What ``state`` has returned since the last news."""

    def state(self, peer: PeerId) -> PeerState | None:
        """What ``peer`` last said; far more is asked than told."""
        if self.built is None and self.body is not None:
            self.built = PeerState(peer, self.body, self.metrics, self.heard_s)
        return self.built

    def alive(self, now: float) -> bool:
        return self.body is not None and now <= self.until

    @property
    def said_goodbye(self) -> bool:
        """Whether it is leaving, and holds nothing any more."""
        spans = self.metrics.spans if self.metrics is not None else ()
        return self.body is not None and self.body.leaving and not spans


class View:
    """The newest records of each peer of one swarm; the bodies of a private one are opened with
    ``secret``.
    """

    def __init__(self, swarm: bytes, secret: SwarmKey | None = None) -> None:
        self._swarm = swarm
        self._secret = secret
        self._known: dict[PeerId, _Known] = {}  # longest without a record first
        self._present: set[PeerId] = set()
        self._sorted: list[PeerId] | None = None  # the same by id, once asked for
        self._states: tuple[PeerState, ...] | None = None  # what they last said, once asked for
        self._earliest = math.inf  # before this nobody of them falls silent
        self._told: frozenset[PeerId] = frozenset()  # who was present when changes were last asked for
        self._version = 0
        self._changed: dict[PeerId, int] = {}  # the version that a peer's last change made, ascending

    def apply(self, record: Record, now: float, *, life: float | None = None) -> bool:
        """Take in a verified record received at local time ``now`` (s); True if it was news.

        ``life`` is how many seconds it has left, all of them when nobody has kept it meanwhile. Records of
        other swarms and kinds, and those with a body that is not to be believed, are no news.
        """
        life = record.ttl if life is None else min(life, record.ttl)
        if record.swarm != self._swarm or record.kind not in ("peer", "metrics") or life <= 0:
            return False
        if not self.is_newer(record.peer_id, record.kind, record.seq):
            return False
        try:
            body = record.body(self._secret)
        except RecordError:
            return False
        known = self._known.pop(record.peer_id, None) or _Known()
        if isinstance(body, PeerBody):
            known.body, known.body_seq = body, record.seq
            if known.metrics is None:
                known.until = now + min(life, JOIN_S)
        elif isinstance(body, MetricsBody):
            if known.metrics is None:
                known.until = -math.inf  # from here on only metrics count
            known.metrics, known.metrics_seq = body, record.seq
            known.signed_until = max(known.signed_until, now + min(life, GONE_S))
            known.until = max(known.until, known.signed_until)
            known.heard_s = now
        if known.metrics is None:
            known.heard_s = now
        known.record_s = now
        known.built = None
        self._keep(record.peer_id, known, now)
        return True

    def hint(self, digest: Digest, now: float) -> bool:
        """Take in that somebody holds a record; True if only the record itself can tell what it means.

        A newer sequence number keeps a peer that is here, for HINT_S beyond its last record at most.
        """
        known = self._known.get(digest.peer_id)
        if known is None:
            return True
        if digest.kind != "metrics":
            return known.body is None
        if digest.seq <= known.metrics_seq:
            return False
        if not known.alive(now):
            return True
        until = min(now + min(digest.life, GONE_S), known.signed_until + HINT_S)
        if until > known.until:
            known.until, known.heard_s = until, now
            known.built = None
            self._is_news(digest.peer_id)
        return False

    def news(self, version: int) -> tuple[int, list[PeerId]]:
        """(version now, peers of whom something changed since ``version``, newest first); 0 for all.

        Who came, said something, left, or was found silent by `expire`: `peer` tells which.
        """
        newest_first = reversed(self._changed.items())
        return self._version, [peer for peer, _ in takewhile(lambda item: item[1] > version, newest_first)]

    def expire(self, now: float) -> None:
        """Make news of those who have fallen silent, and forget those who long have."""
        if now > self._earliest:
            for peer in [peer for peer in self._present if not self._known[peer].alive(now)]:
                self._leave(peer)
            self._earliest = min((self._known[peer].until for peer in self._present), default=math.inf)
        while self._known and next(iter(self._known.values())).record_s < now - REMEMBER_S:
            self._forget_first()

    def changes(self, now: float) -> tuple[frozenset[PeerId], frozenset[PeerId]]:
        """(arrived, gone) since the last call."""
        self.expire(now)
        present, told = frozenset(self._present), self._told
        self._told = present
        return present - told, told - present

    def peers(self, now: float) -> tuple[PeerState, ...]:
        """All live peers, by id."""
        if self._states is None:
            if self._sorted is None:
                self._sorted = sorted(self._present)
            states = (self._known[peer].state(peer) for peer in self._sorted)
            self._states = tuple(state for state in states if state is not None)
        if now <= self._earliest:
            return self._states
        return tuple(state for state in self._states if self._known[state.peer].alive(now))

    def peer(self, peer: PeerId, now: float) -> PeerState | None:
        """One live peer, or None."""
        known = self._known.get(peer)
        return None if known is None or not known.alive(now) else known.state(peer)

    def seq(self, peer: PeerId) -> int:
        """The highest sequence number seen from ``peer`` (0: none)."""
        known = self._known.get(peer)
        return 0 if known is None else max(known.body_seq, known.metrics_seq)

    def is_newer(self, peer: PeerId, kind: str, seq: int) -> bool:
        """Whether a ``peer`` or ``metrics`` record with this number would say more than what is known."""
        known = self._known.get(peer)
        return known is None or seq > (known.body_seq if kind == "peer" else known.metrics_seq)

    def __len__(self) -> int:
        """How many peers are here."""
        return len(self._present)

    def _keep(self, peer: PeerId, known: _Known, now: float) -> None:
        """Put a peer of whom a record came behind all others, and see whether it is here."""
        self._known[peer] = known
        if known.said_goodbye:
            known.until = -math.inf
        if known.alive(now):
            if peer not in self._present:
                self._present.add(peer)
                self._sorted = None
            self._earliest = min(self._earliest, known.until)
            self._is_news(peer)
        elif peer in self._present:
            self._leave(peer)
        if len(self._known) > MAX_PEERS:
            self._forget_first()

    def _leave(self, peer: PeerId) -> None:
        self._present.remove(peer)
        self._sorted = None
        self._is_news(peer)

    def _forget_first(self) -> None:
        peer = next(iter(self._known))
        if peer in self._present:
            self._leave(peer)
        del self._known[peer]

    def _is_news(self, peer: PeerId) -> None:
        self._states = None
        self._version += 1
        self._changed.pop(peer, None)
        self._changed[peer] = self._version
        if len(self._changed) > 2 * MAX_PEERS:
            del self._changed[next(iter(self._changed))]
