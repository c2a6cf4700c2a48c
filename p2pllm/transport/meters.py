"""What a peer costs, and how fast things get to it: counting only, the caller tells the time."""

from __future__ import annotations

import math
from collections import deque

__all__ = ["Gauge", "Quota"]

_FADE = 0.9
"""Of what was counted, with each transfer: the last dozen or so count."""

_MAX_WAITING = 64

_LATEST = 16
_LEAST = 4


class Quota:
    """At most ``most`` of something in each ``period`` seconds; the last that is begun may be finished."""

    def __init__(self, most: float, period: float) -> None:
        self._most = most
        self._period = period
        self._left = most
        self._ends = 0.0

    def take(self, cost: float, now: float) -> float:
        """Count what something has cost; return how many seconds from ``now`` on there may be no more."""
        if now >= self._ends:
            self._left, self._ends = self._most, now + self._period
        self._left -= cost
        return 0.0 if self._left > 0.0 else self._ends - now


class Gauge:
    """Bytes per second at which large frames get to a peer, by pings sent right behind them.

    When a frame was taken from us says nothing: layers of buffers take in megabytes at once. The answer to a
    ping says that everything before it has arrived, a round trip after it would have on an infinitely fast
    link; and a frame behind others began to travel when the one before it had arrived.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[int, float]] = {}
        self._round_trip = math.inf
        self._arrived = -math.inf
        self._bytes = 0.0
        self._seconds = 0.0
        self._latest: deque[float] = deque(maxlen=_LATEST)

    @property
    def value(self) -> float:
        """Bytes per second of past frames; 0 before the first."""
        return self._bytes / self._seconds if self._seconds > 0.0 else 0.0

    @property
    def unhindered(self) -> float:
        """Bytes per second that one of four frames reached lately; 0 before the fourth.

        What held up the others need not be the way: the peer may have been busy, or asleep.
        """
        known = sorted(self._latest)
        return known[3 * len(known) // 4] if len(known) >= _LEAST else 0.0

    def pinged(self, seconds: float) -> None:
        """Learn how long a ping by itself took to be answered."""
        self._round_trip = min(self._round_trip, seconds)

    def sent(self, nonce: int, size: int, now: float) -> bool:
        """Whether to send a ping with this nonce behind a frame of ``size`` bytes that is sent ``now``."""
        if len(self._waiting) >= _MAX_WAITING:
            return False
        self._waiting[nonce] = (size, now)
        return True

    def answered(self, nonce: int, now: float) -> None:
        """Count the frame before the ping with this nonce, if there was one."""
        size, sent = self._waiting.pop(nonce, (0, now))
        if not size:
            return
        round_trip = self._round_trip if math.isfinite(self._round_trip) else 0.0
        began = max(sent + round_trip, self._arrived)
        self._arrived = now
        self._latest.append(size / (now - began) if now > began else math.inf)
        if now > began:
            self._bytes = _FADE * self._bytes + size
            self._seconds = _FADE * self._seconds + now - began
