"""What steps have done since the start, in sums that only grow: who looks twice knows what was between."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["Tally", "Totals"]


@dataclass(frozen=True, slots=True)
class Totals:
    """``steps`` took ``step_s`` seconds and had ``tokens`` rows; ``runs`` waited ``wait_s`` for their first
    step, all in all.
    """

    steps: int = 0
    step_s: float = 0.0
    tokens: int = 0
    runs: int = 0
    wait_s: float = 0.0


class Tally:
    """Adds them up."""

    def __init__(self) -> None:
        self.totals = Totals()

    def waited(self, wait_s: float) -> None:
        """A run's first step begins."""
        totals = self.totals
        self.totals = replace(totals, runs=totals.runs + 1, wait_s=totals.wait_s + wait_s)

    def stepped(self, step_s: float, tokens: int) -> None:
        """A step is over."""
        totals = self.totals
        self.totals = replace(
            totals, steps=totals.steps + 1, step_s=totals.step_s + step_s, tokens=totals.tokens + tokens
        )
