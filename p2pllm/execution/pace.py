"""How many rows of prompts a step takes, so that those who are chatting hardly notice."""

from __future__ import annotations

from p2pllm.execution.meter import Meter

__all__ = ["Pace"]

_MOST_ROWS = 512
"""Of a step while nobody decodes: more at once is hardly faster."""
_FEWEST_ROWS = 8
_SIZES = (12, 15)
"""Steps of so many rows in all are hardly slower than smaller ones, see `architecture/kernels.py`."""
_LARGE = 24
"""Those of more rows, up to here, are much slower for what they do."""
_FIRST_ROWS = 48
"""While nothing is measured."""
_STRETCH = 2.6
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

    def rows(self, now: float, *, decoding: int) -> int:
        """Rows of prompts for a step that begins at time ``now`` (s), beside ``decoding`` single ones."""
        lately = self._decoded_at is not None and now - self._decoded_at < _LATELY_S
        if not decoding and not lately:
            return _MOST_ROWS
        rows = float(_FIRST_ROWS)
        if self._decode_s is not None and self._row_s is not None:
            rows = (_STRETCH - 1) * self._decode_s.value(now) / max(self._row_s.value(now), 1e-9)
        return _rounded(max(_FEWEST_ROWS, min(_MOST_ROWS, int(rows))), decoding)

    def note(self, decoding: int, rows: int, seconds: float, now: float) -> None:
        """Learn that a step of ``decoding`` single rows and ``rows`` rows of prompts took so long."""
        if decoding:
            self._decoded_at = now
        if rows == 0:
            self._decode_s = _with(self._decode_s, seconds, now)
        elif rows >= _FEWEST_ROWS:
            beside = self._decode_s.value(now) if decoding and self._decode_s else 0.0
            self._row_s = _with(self._row_s, max(0.0, seconds - beside) / rows, now)


def _rounded(rows: int, decoding: int) -> int:
    """So many rows, or somewhat fewer if that makes the step beside ``decoding`` others a quick one."""
    total = rows + decoding
    fitting = [size for size in _SIZES if decoding + _FEWEST_ROWS <= size <= max(_SIZES[0], total)]
    return fitting[-1] - decoding if fitting and total < _LARGE else rows


def _with(meter: Meter | None, sample: float, now: float) -> Meter:
    meter = meter or Meter(sample, half_life=_HALF_LIFE)
    meter.add(sample, now)
    return meter
