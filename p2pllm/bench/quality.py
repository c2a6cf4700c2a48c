"""What rounding does to a model: how well it foretells a text, and how often it says what the exact one says.

Knows torch, as the executor gives away tokens but no logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from p2pllm.execution import Checkpoint

__all__ = ["Quality", "Weights", "quality"]


@dataclass(frozen=True, slots=True)
class Weights:
    """How weights are held: a dtype, and a quantization as ``--quant`` takes it."""

    dtype: str
    quant: str = "none"


@dataclass(frozen=True, slots=True)
class Quality:
    """``perplexity`` of a text, and the token that is thought most likely after each of the text's."""

    perplexity: float
    best: tuple[int, ...]


def quality(checkpoint: Checkpoint, weights: Weights, text: Sequence[int]) -> Quality:
    """Read a text with weights as an executor holds them. Raises `ModelError`."""
    import torch

    from p2pllm.execution.attention import Segment
    from p2pllm.execution.kv import private_caches
    from p2pllm.execution.loader import Loader

    loader = Loader(checkpoint, dtype=weights.dtype, device="cpu", quant=weights.quant)
    loader.load(0, checkpoint.layers)
    (cache,) = private_caches([len(text)])
    rows = torch.tensor(text)
    with torch.inference_mode():
        hidden = loader.stage.forward([Segment(cache, 0, len(text))], rows, 0, checkpoint.layers)
        logits = loader.stage.logits(hidden).float()
    surprise = -logits[:-1].log_softmax(-1).gather(1, rows[1:, None]).mean()
    return Quality(round(float(surprise.exp()), 3), tuple(logits.argmax(-1).tolist()))
