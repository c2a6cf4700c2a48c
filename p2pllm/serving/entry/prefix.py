"""Names for beginnings of texts, by which stages find KV blocks that they have kept.

A block's name is the hash of its tokens and of the block before it, as in vLLM's automatic prefix caching, so
it stands for everything up to its end. Names are keyed with a secret of the entry: stages cannot guess texts
from them, and no client can make two texts of one name.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from p2pllm.execution import BLOCK_TOKENS
from p2pllm.scheduling import Stage
from p2pllm.transport import HASH_BYTES, MAX_PREFIX_BYTES

__all__ = ["SECRET_BYTES", "prefix_names", "upstream_name"]

SECRET_BYTES = 32

_CHAIN_BYTES = 16


def prefix_names(tokens: Sequence[int], secret: bytes) -> bytes:
    """The names of all full blocks of ``tokens``, one after the other, as far as an Open has room."""
    names = bytearray()
    before = b""
    most = MAX_PREFIX_BYTES // HASH_BYTES * BLOCK_TOKENS
    ids = array("I", tokens[:most])
    for start in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = before + ids[start : start + BLOCK_TOKENS].tobytes()
        before = blake2b(block, digest_size=_CHAIN_BYTES, key=secret).digest()
        names += before[:HASH_BYTES]
    return bytes(names)


def upstream_name(stages: Sequence[tuple[Stage, str]]) -> bytes:
    """What the hidden states of a text depend on besides the text, when they come from ``stages``, each with
    the numerics of its peer: two chains that round differently must not share blocks.
    """
    facts = ";".join(f"{stage.start}:{stage.end}:{numerics}" for stage, numerics in stages)
    return blake2b(facts.encode(), digest_size=HASH_BYTES).digest()
