"""How a stage shares itself out among entries, none of which it can trust. Pure.

As long as there is room everybody gets what they ask for. The last tenth is for entries that have less than
their share here, which is the same for all, one that is still to come included; who has nothing here yet is
never refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from p2pllm.execution import ExecutorStats, blocks_for
from p2pllm.scheduling import PeerId
from p2pllm.transport import Open

__all__ = ["crowded_out", "over_share"]

KEPT: Final = 0.1
"""What is kept for those below their share, as a part of all there is."""


def crowded_out(plan: Open, others: Iterable[Open], stats: ExecutorStats, most: int) -> str:
    """Why ``plan`` cannot be opened beside the ``others`` that are open here, of ``most``, or empty."""
    taken, blocks = Counter[PeerId](), Counter[PeerId]()
    for other in others:
        taken[other.entry] += 1
        blocks[other.entry] += _blocks(other)
    if over_share(plan.entry, 1, taken, free=most - taken.total(), total=most):
        return "this entry has its share of the sessions here"
    _, start, end = plan.stages[plan.stage]
    # A block of ``stats`` is one of all layers.
    free, total = stats.kv_blocks_free * (end - start), stats.kv_blocks_total * (end - start)
    if over_share(plan.entry, _blocks(plan), blocks, free=free, total=total):
        return "this entry has its share of the KV cache here"
    return ""


def over_share(
    entry: PeerId, wanted: float, used: Mapping[PeerId, float], *, free: float, total: float
) -> bool:
    """Whether ``entry`` may not have ``wanted`` more, ``free`` of ``total`` being left; ``used`` is what each
    entry has of it now.
    """
    if free - wanted >= KEPT * total or not used.get(entry):
        return False
    everything = sum(used.values()) + wanted
    return used[entry] + wanted > everything / (len(used) + 1)


def _blocks(plan: Open) -> int:
    """Blocks of single layers that a session asks for at first."""
    _, start, end = plan.stages[plan.stage]
    return blocks_for(plan.reserve, end - start)
