"""How many rows of prompts a step takes, so that those who are chatting hardly notice.

What a step takes does not grow evenly with its rows: kernels have sizes that suit them, and which these are
depends on the machine and on the weights. So it is learnt for a number of sizes, and among those that are
quick enough the one is taken that gets a prompt read the soonest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from p2pllm.execution.meter import Meter

__all__ = ["Pace"]

_SIZES = (12, 15, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Rows of a step in all, those of decoding sessions included."""
_FEWEST_ROWS = 8
_FIRST_ROWS = 48
"""While nothing is measured."""
_MOST_ROWS = 512
"""While nobody decodes: more at once is hardly faster."""
_STRETCH = 2.6
"""Steps of decoding sessions may take so many times as long while prompts are read."""
_TRIAL_STRETCH = 2.2
"""The same where what a size takes is only guessed."""
_LATELY_S = 1.0
"""A session that decoded so lately is waiting for its token to come round."""
_FORGET_S = 20.0
"""A size that was not taken for so long is thought of as its neighbours are, and so may be tried again."""
_NEAR = 0.9
"""A step with so much of a size's rows tells what that size takes."""
_HALF_LIFE = 60.0


class Pace:
    """Learns from each step what decoding takes, and what steps of each size take."""

    def __init__(self) -> None:
        self._decode_s: Meter | None = None
        self._sizes: dict[int, tuple[Meter, float]] = {}
        """Seconds of a step, and when one was last taken."""
        self._decoded_at: float | None = None

    def rows(self, now: float, *, decoding: int) -> int:
        """Rows of prompts for a step that begins at time ``now`` (s), beside ``decoding`` single ones."""
        lately = self._decoded_at is not None and now - self._decoded_at < _LATELY_S
        if not decoding and not lately:
            return _MOST_ROWS
        if self._decode_s is None:
            return _FIRST_ROWS
        decode_s = self._decode_s.value(now)
        fitting = [size - decoding for size in _SIZES if size - decoding >= _FEWEST_ROWS]
        best, most_per_s = fitting[0] if fitting else _FEWEST_ROWS, 0.0
        known = self._known(now)
        for rows in fitting:
            size = decoding + rows
            step_s, stretch = known.get(size), _STRETCH
            if step_s is None:
                step_s, stretch = _guess(size, decode_s, known), _TRIAL_STRETCH
            if step_s <= stretch * decode_s and rows / step_s >= most_per_s:
                best, most_per_s = rows, rows / step_s
        return best

    def note(self, decoding: int, rows: int, seconds: float, now: float) -> None:
        """Learn that a step of ``decoding`` single rows and ``rows`` rows of prompts took so long."""
        if decoding:
            self._decoded_at = now
        if rows == 0:
            self._decode_s = self._decode_s or Meter(seconds, half_life=_HALF_LIFE)
            self._decode_s.add(seconds, now)
            return
        total = decoding + rows
        size = next((size for size in _SIZES if _NEAR * size <= total <= size), None)
        if size is not None:
            is_known = size in self._known(now)
            meter = self._sizes[size][0] if is_known else Meter(seconds, half_life=_HALF_LIFE)
            meter.add(seconds, now)
            self._sizes[size] = meter, now

    def _known(self, now: float) -> dict[int, float]:
        """Seconds of a step of each size that was taken lately."""
        return {
            size: meter.value(now) for size, (meter, last) in self._sizes.items() if now - last < _FORGET_S
        }


def _guess(size: int, decode_s: float, known: Mapping[int, float]) -> float:
    """Seconds of a step of so many rows, by those of other sizes."""
    smaller = [
        decode_s + max(0.0, seconds - decode_s) * size / other
        for other, seconds in known.items()
        if other < size
    ]
    larger = [seconds for other, seconds in known.items() if other > size]
    return min([*smaller, *larger], default=decode_s if size <= _FIRST_ROWS else math.inf)
