"""Hidden states rounded for the way to the next stage, where that is slow.

Stages work on different chunks of a prompt at the same time, so a chunk should take no longer on its way than
it takes to compute. What was rounded once is so again when a session goes on by another chain: the next stage
must get the same numbers as the one before it, or other tokens would come of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from p2pllm.execution import Activation
from p2pllm.transport import ROUNDED, pack_rows, unpack_rows

__all__ = ["Rounding", "received", "rounded"]


@dataclass(slots=True)
class Rounding:
    """Which tokens of a session its stage rounded: in spans [start, end), apart from each other, in order."""

    spans: list[tuple[int, int]] = field(default_factory=list)

    def decide(self, position: int, hidden: Activation, *, upload: float, compute_s: float) -> bool:
        """Whether to round hidden states that are sent for the first time, for tokens from ``position`` on.

        That is for chunks that took ``compute_s`` seconds, and take longer than that with ``upload`` bytes
        per second (0: not known). All that was sent from ``position`` on before is forgotten.
        """
        rows = hidden.shape[0]
        is_due = rows > 1 and 0 < upload * compute_s < len(hidden.data)
        self.spans = [(start, min(end, position)) for start, end in self.spans if start < position]
        if is_due and self.spans and self.spans[-1][1] == position:
            self.spans[-1] = (self.spans[-1][0], position + rows)
        elif is_due:
            self.spans.append((position, position + rows))
        return is_due

    def parts(self, start: int, end: int) -> Iterator[tuple[int, int, bool]]:
        """What tokens [start, end) fall into, in order: spans, each with whether it was rounded."""
        edges = sorted({start, end, *(edge for span in self.spans for edge in span if start < edge < end)})
        for begin, stop in pairwise(edges):
            yield begin, stop, any(first <= begin < last for first, last in self.spans)


async def rounded(hidden: Activation) -> Activation:
    """Hidden states as they are sent when they are rounded; raises FrameError if not all are finite."""
    # In a thread: a large chunk takes milliseconds.
    data = await asyncio.to_thread(pack_rows, hidden.dtype, hidden.shape, hidden.data)
    return Activation(ROUNDED, hidden.shape, data)


async def received(hidden: Activation) -> Activation:
    """Hidden states as the executor takes them; raises FrameError for rounded ones that are not finite."""
    if hidden.dtype != ROUNDED:
        return hidden
    data = await asyncio.to_thread(unpack_rows, hidden.shape, hidden.data)
    return Activation("float32", hidden.shape, data)
