"""What goes into a step of the executor and what comes out, free of torch for the event loop's side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from p2pllm.errors import P2PLLMError
from p2pllm.execution.kv import SessionCache
from p2pllm.execution.types import Activation, SamplingParams, StageOutput

__all__ = ["Outcome", "StepTimes", "Work"]

Outcome = StageOutput | P2PLLMError
"""Work that cannot be run has its error as its outcome, so that the work beside it has its own."""


@dataclass(frozen=True, slots=True)
class Work:
    """One session's part of a step: ``inputs`` go in at ``position``, through layers [start, end)."""

    cache: SessionCache
    start: int
    end: int
    position: int
    inputs: Sequence[int] | Activation
    sampling: SamplingParams | None
    """Not None where the last row's token is wanted."""

    @property
    def count(self) -> int:
        """Rows of ``inputs``."""
        return self.inputs.shape[0] if isinstance(self.inputs, Activation) else len(self.inputs)


@dataclass(slots=True)
class StepTimes:
    """Decode times in seconds, per layer and of the head, of passes that held nothing but single rows."""

    layer_s: float | None = None
    head_s: float | None = None
