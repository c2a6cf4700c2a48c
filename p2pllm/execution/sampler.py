"""Drawing a token: a pure function of the logits, the parameters and one uniform number.

Temperature, top-k and top-p keep the same tokens as transformers' generation does. The draw walks the kept
tokens in the order of their ids, not of their probability, so that rounding moves a boundary a little but
never reorders them.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

from p2pllm.errors import SessionError
from p2pllm.execution.types import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["keep", "sample", "uniform"]

GREEDY_BELOW = 1e-4
"""Smaller temperatures are greedy: in float32 they leave one token anyhow, or none that is a number."""


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for the token at ``position``, the same on every machine."""
    digest = blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


def keep(scores: Tensor, *, top_k: int, top_p: float) -> Tensor:
    """Which ``scores`` (vocabulary,) stay: the ``top_k`` best, of them the fewest that hold ``top_p``."""
    import torch

    kept = torch.ones_like(scores, dtype=torch.bool)
    if 0 < top_k < scores.numel():
        kept = scores >= torch.topk(scores, top_k).values[-1]
    if top_p < 1.0:
        ascending, order = torch.sort(scores.masked_fill(~kept, float("-inf")))
        dropped = ascending.softmax(0).cumsum(0) <= 1 - top_p
        dropped[-1] = False  # the best token always stays
        kept = kept & torch.ones_like(kept).scatter(0, order, ~dropped)
    return kept


def sample(logits: Tensor, params: SamplingParams, chance: float) -> int:
    """The token that ``chance`` in [0, 1) picks from ``logits`` (vocabulary,), float32.

    Temperature 0 takes the best token, the first of equals. Raises `SessionError` if the logits are not
    numbers.
    """
    import torch

    best = int(logits.argmax())
    if not torch.isfinite(logits[best]):
        raise SessionError("the model produced no finite logits: its weights or dtype are not usable here")
    if params.temperature < GREEDY_BELOW:
        return best
    scores = (logits - logits[best]) / params.temperature
    kept = keep(scores, top_k=params.top_k, top_p=params.top_p)
    weights = scores.double().exp().masked_fill(~kept, 0.0)
    cumulative = weights.cumsum(0)
    target = chance * cumulative[-1]
    # The first token at which the running sum passes the target; a token of weight 0 never is.
    return min(int(torch.searchsorted(cumulative, target, right=True)), int(weights.nonzero()[-1]))
