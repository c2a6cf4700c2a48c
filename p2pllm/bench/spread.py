"""Two figures for many samples."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

__all__ = ["Spread"]

DIGITS = 4


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle of some samples, and what 99 of 100 stay within."""

    median: float
    p99: float

    @classmethod
    def of(cls, samples: Sequence[float], *, scale: float = 1.0) -> Self:
        """From at least one sample, each times ``scale``."""
        ordered = sorted(scale * sample for sample in samples)
        p99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
        return cls(round(statistics.median(ordered), DIGITS), round(p99, DIGITS))
