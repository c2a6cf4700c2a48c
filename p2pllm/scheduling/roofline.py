"""How long a peer works on a token, from what its hardware can do at best (the roofline).

A pass over weights reads all of them once, however many tokens it takes through, and computes with every
parameter for each token. Decode is a pass per token and waits for memory; prefill takes the whole prompt at
once and waits for arithmetic. So two GPUs that are 1.8 apart in one may be 1.3 apart in the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Phase", "Request", "Roofline"]

Phase: TypeAlias = Literal["mix", "decode", "prefill"]

BANDWIDTH_REACHED = 0.93
"""Share of the memory bandwidth that streaming weights reaches (fitted to measured vLLM runs, as is next)."""

FLOPS_REACHED = 0.95
"""Share of the FLOP/s that large matrix products reach."""


@dataclass(frozen=True, slots=True)
class Request:
    """What one request is expected to be: tokens of the prompt and of the answer, each at least 1."""

    prompt: int = 512
    tokens: int = 128


@dataclass(frozen=True, slots=True)
class Roofline:
    """A peer's ceilings: FLOP/s in the model's dtype, and bytes/s of its memory. Both above 0."""

    flops: float
    bandwidth: float

    def pass_s(self, weight_bytes: float, parameters: float, tokens: int = 1) -> float:
        """Seconds of one pass of ``tokens`` tokens: memory and arithmetic overlap but in part, so they add up
        as the root of the sum of their squares.
        """
        memory_s = weight_bytes / (BANDWIDTH_REACHED * self.bandwidth)
        compute_s = 2 * parameters * tokens / (FLOPS_REACHED * self.flops)
        return math.hypot(memory_s, compute_s)

    def layer_s(self, weight_bytes: float, parameters: float, request: Request, phase: Phase) -> float:
        """Seconds per token of one layer of so many bytes and parameters.

        In ``decode`` that is a token of the answer, in ``prefill`` one of the prompt, in the ``mix`` one of
        the answer with its share of the prompt.
        """
        decode_s = self.pass_s(weight_bytes, parameters)
        prompt_s = self.pass_s(weight_bytes, parameters, request.prompt)
        match phase:
            case "decode":
                return decode_s
            case "prefill":
                return prompt_s / request.prompt
            case "mix":
                return decode_s + prompt_s / request.tokens

    def head_s(self, weight_bytes: float, parameters: float, request: Request, phase: Phase) -> float:
        """Seconds per token, counted as in ``layer_s``, of the LM head: only tokens of the answer need it,
        which for a prompt is one, the first.
        """
        once_s = self.pass_s(weight_bytes, parameters)
        return once_s / request.prompt if phase == "prefill" else once_s
