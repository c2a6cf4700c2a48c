"""What goes into a step of the executor and what comes out, free of torch for the event loop's side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from p2pllm.errors import P2PLLMError
from p2pllm.execution.kv import SessionCache, Tables
from p2pllm.execution.types import Activation, SamplingParams, StageOutput

__all__ = ["Outcome", "StepTimes", "TriedOut", "Work"]

Outcome = StageOutput | P2PLLMError
"""Work that cannot be run has its error as its outcome, so that the work beside it has its own."""


@dataclass(frozen=True, slots=True)
class Work:
    """One session's part of a step: ``inputs`` go in at ``position``, through layers [start, end)."""

    cache: SessionCache
    tables: Tables
    """The cache's, as of when the work was queued."""
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
    """Times in seconds: of the whole step, and, of passes that held nothing but single rows, per layer and of
    the head.
    """

    step_s: float = 0.0
    layer_s: float | None = None
    head_s: float | None = None


@dataclass(frozen=True, slots=True)
class TriedOut:
    """What a trial of layers showed: times of a step, KV bytes of one token in one layer, and how far back
    each layer sees (None: all the way).
    """

    times: StepTimes
    token_bytes: int
    windows: Mapping[int, int | None]
