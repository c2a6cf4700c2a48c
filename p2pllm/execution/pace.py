"""How many rows of prompts a step takes, so that those who are chatting hardly notice."""

from __future__ import annotations

from p2pllm.execution.meter import Meter

__all__ = ["Pace"]

_MOST_ROWS = 512
"""Of a step while nobody decodes: more at once is hardly faster."""
_FEWEST_ROWS = 32
"""As many take hardly longer than half of them."""
_FIRST_ROWS = 64
"""While nothing is measured."""
_STRETCH = 2.2
"""Steps of decoding sessions may take so many times as long while prompts are read."""
_LATELY_S = 1.0
"""A session that decoded so lately is waiting for its token to come round."""
_HALF_LIFE = 60.0


class Pace:
    """Learns from each step what decoding takes and what a row of a prompt adds."""

    def __init__(self) -> None:
        self._decode_s: Meter | None = None
        self._row_s: Meter | None = None
        self._decoded_at: float | None = None

    def rows(self, now: float, *, is_decoding: bool) -> int:
        """Rows of prompts for a step that begins at time ``now`` (s), with or without others that decode."""
        lately = self._decoded_at is not None and now - self._decoded_at < _LATELY_S
        if not is_decoding and not lately:
            return _MOST_ROWS
        if self._decode_s is None or self._row_s is None:
            return _FIRST_ROWS
        rows = (_STRETCH - 1) * self._decode_s.value(now) / max(self._row_s.value(now), 1e-9)
        return max(_FEWEST_ROWS, min(_MOST_ROWS, int(rows)))

    def note(self, decoding: int, rows: int, seconds: float, now: float) -> None:
        """Learn that a step of ``decoding`` single rows and ``rows`` rows of prompts took so long."""
        if decoding:
            self._decoded_at = now
        if rows == 0:
            self._decode_s = _with(self._decode_s, seconds, now)
        elif rows >= _FEWEST_ROWS:
            beside = self._decode_s.value(now) if decoding and self._decode_s else 0.0
            self._row_s = _with(self._row_s, max(0.0, seconds - beside) / rows, now)


def _with(meter: Meter | None, sample: float, now: float) -> Meter:
    meter = meter or Meter(sample, half_life=_HALF_LIFE)
    meter.add(sample, now)
    return meter
