"""How stages are asked to take part in a session, and fed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from p2pllm.scheduling import Chain, PeerId
from p2pllm.serving.entry.prefix import upstream_name
from p2pllm.serving.entry.request import Generation, Network
from p2pllm.transport import Open, Tokens

__all__ = ["LEASE_S", "RESERVE_AHEAD", "feeding", "opening", "rounding", "rows_of"]

RESERVE_AHEAD = 256
"""Tokens of KV cache to reserve beyond the prompt; stages extend it as the answer grows."""

CHUNK = 256
"""Prompt tokens per frame: transfer and compute of neighbouring stages overlap."""

LEASE_S = 10.0
"""How long a stage keeps a session whose entry says nothing."""


def rows_of(chain: Chain) -> tuple[tuple[PeerId, int, int], ...]:
    """The stages of a chain as messages have them."""
    return tuple((stage.peer, stage.start, stage.end) for stage in chain.stages)


def feeding(
    session: str, generation: int, known: Sequence[int], start: int, *, sample: bool
) -> Iterator[Tokens]:
    """What gives the first stage the tokens from ``start`` on; with ``sample`` the next one is drawn."""
    for first in range(start, len(known), CHUNK):
        is_last = first + CHUNK >= len(known)
        yield Tokens(session, 0, generation, first, tuple(known[first : first + CHUNK]), sample and is_last)


def rounding(chain: Chain, numerics: Callable[[PeerId], str]) -> bytes:
    """A name for how the hidden states of a chain are rounded."""
    return upstream_name([(stage, numerics(stage.peer)) for stage in chain.stages])


def opening(
    chain: Chain,
    index: int,
    *,
    session: str,
    generation: int,
    request: Generation,
    known: Sequence[int],
    prefix: bytes,
    network: Network,
) -> Open:
    """The Open for a stage of the chain with this ``generation``, when these tokens are ``known``, whose
    blocks have the names ``prefix``.
    """
    sampling = request.sampling
    return Open(
        session=session,
        stage=index,
        generation=generation,
        stages=rows_of(chain),
        entry=network.own,
        reserve=min(len(known) + RESERVE_AHEAD, request.limit + 1),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        eos=tuple(sorted(network.eos)),
        limit=request.limit,
        lease_s=LEASE_S,
        prefix=prefix,
        upstream=rounding(Chain(chain.stages[:index], 0.0), network.numerics),
    )
