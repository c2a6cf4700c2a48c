"""What came of each run of ``bench recovery``, and what all of them say together. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from p2pllm.bench.spread import Spread

__all__ = ["Run", "Summary", "longest_wait"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One answer in the middle of which a peer of its chain was lost.

    ``role`` is the peer's place in a ``chain`` of that many stages, ``frozen``: it was stopped, not killed,
    after ``struck`` pieces of the answer. ``failure`` says why the answer is not complete, and is empty if it
    is; ``identical``: its tokens are those of the same request without any loss, ``parted`` how many were
    before the first other one, where there is one at a near tie.

    ``pause_s`` is the longest wait between two pieces from the loss on. ``recomputed`` counts layers ×
    tokens that were computed again (None: the entry does not tell), ``lost`` those that the lost peer's slice
    can have held. ``ttft_s`` is the time to the first token of this answer, before anything happened, and
    ``next_ttft_s`` of the request after it, with the peer still lost (None if that failed).
    """

    role: str
    chain: int
    frozen: bool
    struck: int
    failure: str
    identical: bool
    parted: int | None
    pause_s: float
    recomputed: int | None
    lost: int
    ttft_s: float
    next_ttft_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Of all runs. Pauses are those of complete answers, after a kill and after a freeze.

    ``recomputed_layer_tokens`` is per loss, ``recomputed_share`` what part of ``lost`` that is, in all.
    ``next_ttft_ratio`` is the median time to the first token of the next request ÷ that before a loss; it is
    None if any of them got no answer.
    """

    runs: int
    completed: int
    identical: int
    near_ties: int
    pause_s: Spread | None
    freeze_pause_s: Spread | None
    recomputed_layer_tokens: Spread | None
    recomputed_share: float | None
    next_ttft_ratio: float | None

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Summary:
        """From at least one run."""
        complete = [run for run in runs if not run.failure]
        nexts = [run.next_ttft_s for run in runs if run.next_ttft_s is not None]
        told = [(run.recomputed, run.lost) for run in complete if run.recomputed is not None]
        recomputed, lost = [one for one, _ in told], sum(other for _, other in told)
        ratio = median(nexts) / median(run.ttft_s for run in runs) if len(nexts) == len(runs) else None
        return cls(
            runs=len(runs),
            completed=len(complete),
            identical=sum(run.identical for run in runs),
            near_ties=sum(run.parted is not None and run.identical for run in runs),
            pause_s=_spread([run.pause_s for run in complete if not run.frozen]),
            freeze_pause_s=_spread([run.pause_s for run in complete if run.frozen]),
            recomputed_layer_tokens=_spread(recomputed),
            recomputed_share=round(sum(recomputed) / lost, 4) if lost else None,
            next_ttft_ratio=None if ratio is None else round(ratio, 3),
        )


def longest_wait(arrivals: Sequence[float], since: int) -> float:
    """The longest time between two neighbouring arrivals of which the later one has at least index ``since``;
    0 without any.
    """
    return max((later - earlier for earlier, later in pairwise(arrivals[max(0, since - 1) :])), default=0.0)


def _spread(samples: Sequence[float]) -> Spread | None:
    return Spread.of(samples) if samples else None
