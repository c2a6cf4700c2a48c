"""The sequence numbers of one identity: they only grow, and nobody else may use them. Pure."""

from __future__ import annotations

from typing import Final

from p2pllm.errors import P2PLLMError
from p2pllm.identity import PeerId

__all__ = ["Sequence"]

SETTLE_S: Final = 5.0
"""For so long after the start the records of an earlier run, on their way still, are no cause for alarm."""

UNSAVED_MS: Final = 120_000
"""The number is kept on disk each minute, and grows with the clock: so many can be missing there."""


class Sequence:
    """Numbers the records of ``own`` from its ``start`` (s) on, above ``stored``, the last number that an
    earlier run is known to have used, if any, and what it may have used since.
    """

    def __init__(self, own: PeerId, start: float, stored: int = 0) -> None:
        self._own = own
        self._start = start
        self._last = 0  # sealed by us
        self._floor = stored + UNSAVED_MS if stored else 0  # of an earlier run

    @property
    def last(self) -> int:
        """The number of the newest record of any run."""
        return max(self._last, self._floor)

    def next(self, wall_ms: int) -> int:
        """The number of the next record.

        Wall-clock milliseconds only make it grow across restarts; nobody reads them as a time.
        """
        self._last = max(self._last + 1, self._floor + 1, wall_ms)
        return self._last

    def seen(self, seq: int, published: float) -> None:
        """Somebody holds a record of ``own`` that was published at local time ``published`` or before.

        One of an earlier run makes the numbers jump above it. P2PLLMError if one was sealed by somebody else
        meanwhile, for two that take turns in speaking for one peer would only confuse all others.
        """
        if seq <= self._last:
            return
        if published > self._start + SETTLE_S:
            raise P2PLLMError(
                f"another process signs as peer {self._own[:8]}: its identity file was copied. Delete the "
                "copy, or start with another --data-dir, which makes a new identity"
            )
        self._floor = max(self._floor, seq)
