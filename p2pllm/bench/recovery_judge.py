"""Whether two answers to one request are the same, up to rounding, in the judgement of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import zip_longest
from typing import Any, Final

import numpy as np

from p2pllm.bench.rival import Rival
from p2pllm.execution import Checkpoint, SamplingParams

__all__ = ["Judge", "parting", "tied"]

NEAR_TIE: Final = 1e-3
"""In float32 a greedy token may differ where its logit is this near the best, a sampled one where its uniform
is this near a boundary: the order of a summation decides such ties.
"""


class Judge:
    """Loads the model only when two answers differ, which is seldom."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def allows(
        self,
        prompt: Sequence[int],
        one: Sequence[int],
        other: Sequence[int],
        sampling: SamplingParams,
    ) -> bool:
        """Whether both answers (token ids) may follow the prompt: they are the same, or part at a near tie.

        ``sampling`` is a temperature and a seed, without top-k and top-p.
        """
        from p2pllm.execution.sampler import uniform

        place = parting(one, other)
        if place is None:
            return True
        if place == min(len(one), len(other)):
            return False  # no token is like none
        logits = self._model.logits([*prompt, *one[:place]])
        chance = uniform(sampling.seed, len(prompt) + place)
        return all(tied(logits, tokens[place], sampling.temperature, chance) for tokens in (one, other))

    @cached_property
    def _model(self) -> _Model:
        return _Model(self._checkpoint, threads=1)


class _Model(Rival):
    """transformers' own forward, for what comes last in it."""

    def logits(self, tokens: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
        """(vocabulary,) after these tokens."""

        def last() -> Any:
            with self._torch.inference_mode():
                return self._model(self._rows(tokens)).logits[0, -1].double().numpy()

        return np.asarray(self._in_own_thread(last))


def parting(one: Sequence[int], other: Sequence[int]) -> int | None:
    """How many tokens two answers have in common before they differ; None if they never do."""
    pairs = enumerate(zip_longest(one, other))
    return next((place for place, (first, second) in pairs if first != second), None)


def tied(
    logits: np.ndarray[Any, np.dtype[np.float64]], token: int, temperature: float, chance: float
) -> bool:
    """Whether rounding alone may have picked ``token`` for ``chance`` from ``logits`` (vocabulary,)."""
    if temperature == 0:
        return bool(logits.max() - logits[token] <= NEAR_TIE)
    weights = np.exp((logits - logits.max()) / temperature)
    shares = weights / weights.sum()
    end = float(shares[: token + 1].sum())
    return bool(end - float(shares[token]) - NEAR_TIE <= chance <= end + NEAR_TIE)
