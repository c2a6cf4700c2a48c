"""What a session does when its chain changes: which stages stay, and who computes or sends what again. Pure.

Stages that stay keep their KV cache, and the one before a gap still has what it sent, so nobody computes what
it holds. Petals (Borzunov et al. 2023) keeps the inputs of stages at the client to the same end.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from p2pllm.scheduling import PeerId, Stage

__all__ = ["Hop", "Resumption", "resumption", "survivors"]

Hop = tuple[PeerId, PeerId]
"""From one peer to another."""


@dataclass(frozen=True, slots=True)
class Resumption:
    """How a chain goes on.

    The first stage is fed tokens from ``feed_from`` on, and stage i sends the next one what belongs to
    positions from ``forward_from[i]`` on. ``recomputed`` are layer-tokens that were computed before.
    """

    feed_from: int
    forward_from: tuple[int, ...]
    recomputed: int


def resumption(stages: Sequence[Stage], held: Sequence[int], resume: int) -> Resumption:
    """Return how ``stages``, which hold ``held[i]`` tokens each, come to the token at position ``resume``.

    That one is always fed, for what comes after it; what is held of it and behind it does not count.
    """
    begins = [min(count, resume) for count in held]
    return Resumption(
        feed_from=begins[0],
        forward_from=(*begins[1:], resume),
        recomputed=sum(
            (resume - begin) * (stage.end - stage.start) for stage, begin in zip(stages, begins, strict=True)
        ),
    )


def survivors(
    stages: Sequence[Stage],
    *,
    lost: Collection[PeerId],
    complaints: Collection[Hop] = (),
    newcomers: Collection[Stage] = (),
) -> tuple[Stage, ...]:
    """Return those of a chain's ``stages`` that can stay without peers in ``lost``.

    Of two neighbours around the ring of whom one complains that it cannot reach the other (complainer,
    accused), one goes: a newcomer, for it holds least, else the accused.
    """
    kept = [stage for stage in stages if stage.peer not in lost]
    neighbours = [*zip(stages, [*stages[1:], *stages[:1]], strict=True)]
    for complainer, accused in neighbours + [(second, first) for first, second in neighbours]:
        if complainer in kept and accused in kept and (complainer.peer, accused.peer) in complaints:
            is_newer = complainer in newcomers and accused not in newcomers
            kept.remove(complainer if is_newer else accused)
    return tuple(kept)
