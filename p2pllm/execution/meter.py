"""Running means of what a peer publishes about its speed."""

from __future__ import annotations

__all__ = ["Meter"]

_WEIGHT = 0.1
"""Share of a new sample in the mean."""


class Meter:
    """An exponentially weighted mean that drifts back to ``rest`` while no samples come.

    Without the drift a peer that once was slow would be avoided, never measured again, and so avoided for
    ever.
    """

    def __init__(self, rest: float, *, half_life: float) -> None:
        """``half_life`` is how long (s) half the distance to ``rest`` takes."""
        self._rest = rest
        self._half_life = half_life
        self._mean = rest
        self._last: float | None = None

    def add(self, sample: float, now: float) -> None:
        """Take a sample measured at time ``now`` (s)."""
        mean = self.value(now)
        self._mean = mean + _WEIGHT * (sample - mean)
        self._last = now

    def value(self, now: float) -> float:
        """The mean as of time ``now`` (s)."""
        if self._last is None:
            return self._rest
        share: float = 0.5 ** ((now - self._last) / self._half_life)
        return self._rest + (self._mean - self._rest) * share
