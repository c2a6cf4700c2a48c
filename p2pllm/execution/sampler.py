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

_NUCLEI = (256, 4096)
"""Numbers of tokens among which those of top-p are sought, before all are sorted."""


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for the token at ``position``, the same on every machine."""
    digest = blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


def keep(scores: Tensor, *, top_k: int, top_p: float) -> Tensor | None:
    """Ids, ascending, of those of ``scores`` (vocabulary,) that stay: the ``top_k`` best, of them the fewest
    that hold ``top_p``. None: all.
    """
    import torch

    ids = None
    if 0 < top_k < scores.numel():
        ids = (scores >= torch.topk(scores, top_k).values[-1]).nonzero().flatten()
    if top_p < 1.0:
        best = _nucleus((scores if ids is None else scores[ids]).softmax(0), top_p).sort().values
        ids = best if ids is None else ids[best]
    return ids


def _nucleus(shares: Tensor, top_p: float) -> Tensor:
    """Where the largest of ``shares`` are, as many as it takes to hold ``top_p`` (Holtzman et al. 2020)."""
    import torch

    # They are nearly always few, and to sort a whole vocabulary takes longer than some layers.
    for most in (*_NUCLEI, len(shares)):
        best = torch.topk(shares, min(most, len(shares)))
        before = best.values.cumsum(0, dtype=torch.float64) - best.values
        if before[-1] >= top_p:
            break
    return best.indices[: max(1, int((before < top_p).sum()))]


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
    ids = keep(scores, top_k=params.top_k, top_p=params.top_p)
    weights = (scores if ids is None else scores[ids]).exp()
    cumulative = weights.cumsum(0, dtype=torch.float64)
    # The first token at which the running sum passes the target; a token of weight 0 never is.
    at = int(torch.searchsorted(cumulative, chance * cumulative[-1], right=True))
    if at == len(cumulative):  # the target was rounded up to the sum
        at = int(weights.nonzero()[-1])
    return at if ids is None else int(ids[at])
