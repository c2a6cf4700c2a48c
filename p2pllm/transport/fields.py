"""Limits and checks of what messages are made of."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from p2pllm.errors import FrameError
from p2pllm.identity import PeerId
from p2pllm.transport.schema import boolean, integer, integers, items, matching, printable, row, rows_of

__all__ = [
    "ENTRY_STAGE",
    "HASH_BYTES",
    "INT32",
    "ITEM_BYTES",
    "MAX_CHUNK_TOKENS",
    "MAX_GENERATION",
    "MAX_GOSSIP_RECORDS",
    "MAX_PREFIX_BYTES",
    "MAX_STAGES",
    "Count",
    "Flag",
    "Generation",
    "Nonce",
    "Peer",
    "PeerOrNone",
    "Prefix",
    "Reason",
    "SessionId",
    "StageIndex",
    "Stages",
    "TokenIds",
    "check_chain",
]

MAX_STAGES = 64
"""Stages in a chain."""

MAX_CHUNK_TOKENS = 4096
"""Tokens in one prefill chunk."""

MAX_GOSSIP_RECORDS = 64
"""Records in one Gossip: what fits a frame's header."""

HASH_BYTES = 8
"""Of the name of a KV block, which stands for all tokens up to the end of the block."""

MAX_PREFIX_BYTES = 32 * 1024
"""Names of blocks in one message: of 65,536 tokens."""

MAX_GENERATION = 255
"""How often a session may be re-routed."""

ENTRY_STAGE = -1
"""The ``stage`` of a Token that is meant for the entry."""

INT32 = 2**31 - 1
_LAYERS = 4096
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_peer_or_none = matching(r"([0-9a-f]{40})?", "a peer id of 40 hex digits or nothing")
_peer_id = matching(r"[0-9a-f]{40}", "a peer id of 40 hex digits")
_layer = integer(0, _LAYERS)
_count = integer(0, INT32)

Peer: TypeAlias = Annotated[PeerId, _peer_id]
PeerOrNone: TypeAlias = Annotated[str, _peer_or_none]
SessionId: TypeAlias = Annotated[str, matching(r"[0-9A-Za-z_-]{1,64}", "a session id")]
StageIndex: TypeAlias = Annotated[int, integer(0, MAX_STAGES - 1)]
Generation: TypeAlias = Annotated[int, integer(0, MAX_GENERATION)]
Stages: TypeAlias = Annotated[
    tuple[tuple[PeerId, int, int], ...], items(row(_peer_id, _layer, _layer), MAX_STAGES)
]
Count: TypeAlias = Annotated[int, _count]
TokenIds: TypeAlias = Annotated[tuple[int, ...], integers(0, INT32, MAX_CHUNK_TOKENS, least=1)]
Flag: TypeAlias = Annotated[bool, boolean]
Reason: TypeAlias = Annotated[str, printable(300)]
Prefix: TypeAlias = Annotated[bytes, rows_of(HASH_BYTES, MAX_PREFIX_BYTES)]
Nonce: TypeAlias = Annotated[int, integer(0, 2**64 - 1)]


def check_chain(stages: tuple[tuple[PeerId, int, int], ...], stage: int) -> None:
    """Raise FrameError unless stages cover layers from 0 on without gaps, and ``stage`` is one of them."""
    reached = 0
    for _, start, end in stages:
        if start != reached or end <= start:
            raise FrameError("the stages of a chain follow each other from layer 0 without gaps")
        reached = end
    if stage >= len(stages):
        raise FrameError(f"stage {stage} of a chain of {len(stages)}")
