"""Which chain keeps the KV cache of a text: the next turn of a chat goes where the last one went. Pure.

Stages keep blocks only while nobody else wants the room, and say how much is left when they are opened; what
is remembered here is a hint, and costs nothing if it is wrong.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from p2pllm.execution import BLOCK_TOKENS
from p2pllm.scheduling import Stage
from p2pllm.transport import HASH_BYTES

__all__ = ["NOWHERE", "Affinity", "Kept"]

IDLE_S = 900.0
"""After so long without a further turn a text is forgotten."""

MAX_TEXTS = 4096

_UNLIKE = 1.25
"""Equal peers measure themselves so differently at times."""
_READING = 0.1
"""Reading a token of a prompt takes this share of the time of making one, or less."""


@dataclass(frozen=True, slots=True)
class Kept:
    """``stages`` that kept the first ``tokens`` of a text."""

    stages: tuple[Stage, ...] = ()
    tokens: int = 0

    def is_worth(self, latency_s: float, best_s: float, expected_tokens: int) -> bool:
        """Whether to go there for an answer of so many tokens: ``latency_s`` is what each takes there, and
        ``best_s`` what it takes on the best chain.
        """
        return latency_s <= best_s * (_UNLIKE + _READING * self.tokens / expected_tokens)


NOWHERE = Kept()


class Affinity:
    """Remembers texts by the names of their blocks (`prefix.py`). Times are in seconds."""

    def __init__(self) -> None:
        self._chains: OrderedDict[bytes, tuple[tuple[Stage, ...], float]] = OrderedDict()

    def note(self, names: bytes, prompt_tokens: int, stages: Sequence[Stage], now: float) -> None:
        """These ``stages`` keep the blocks with these names, the first of which are of the prompt.

        It can go on behind its end, or be asked again.
        """
        for end in {prompt_tokens // BLOCK_TOKENS * HASH_BYTES, len(names)}:
            if name := names[:end][-HASH_BYTES:]:
                self._chains[name] = tuple(stages), now
                self._chains.move_to_end(name)
        while len(self._chains) > MAX_TEXTS:
            self._chains.popitem(last=False)

    def recall(self, names: bytes, now: float) -> Kept:
        """Who keeps most of a text whose blocks have these names."""
        for end in range(len(names), 0, -HASH_BYTES):
            stages, noted_s = self._chains.get(names[end - HASH_BYTES : end], ((), now))
            if stages and now - noted_s <= IDLE_S:
                return Kept(stages, end // HASH_BYTES * BLOCK_TOKENS)
        return NOWHERE
