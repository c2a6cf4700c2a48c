"""How fast steps are at present."""

from __future__ import annotations

from p2pllm.execution.meter import Meter
from p2pllm.execution.work import StepTimes

__all__ = ["Speed"]

_HALF_LIFE = 30.0


class Speed:
    """Times (s) of a layer and of the head, in steps that decode. While nothing runs they go back to what
    trials showed.
    """

    def __init__(self) -> None:
        self._layer_s = self._head_s = Meter(0.0, half_life=_HALF_LIFE)

    def layer_s(self, now: float) -> float:
        """Of one layer, at time ``now`` (s)."""
        return self._layer_s.value(now)

    def head_s(self, now: float) -> float:
        """Of norm, LM head and sampling."""
        return self._head_s.value(now)

    def begin_layers(self, layer_s: float) -> None:
        """A trial of the first layers here took so long for each."""
        self._layer_s = Meter(layer_s, half_life=_HALF_LIFE)

    def begin_head(self, head_s: float) -> None:
        """A trial of the head took so long; 0 when it is not here."""
        self._head_s = Meter(head_s, half_life=_HALF_LIFE)

    def note(self, times: StepTimes, now: float) -> None:
        """Learn from a step."""
        if times.layer_s is not None:
            self._layer_s.add(times.layer_s, now)
        if times.head_s is not None:
            self._head_s.add(times.head_s, now)
