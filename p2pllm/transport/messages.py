"""What peers say to each other over a link.

The order of a class's fields is their order on the wire and ``kind`` is its code there; neither may ever
change meaning. Beside each type stands the check that a value from the network must pass. What spans several
fields is checked when a message is made, so no malformed one exists on either side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeAlias

from p2pllm.errors import FrameError
from p2pllm.identity import PeerId
from p2pllm.records import MAX_RECORD_BYTES
from p2pllm.transport.schema import (
    binary,
    boolean,
    choice,
    integer,
    integers,
    items,
    matching,
    octets,
    printable,
    real,
    row,
    rows_of,
)

__all__ = [
    "ENTRY_STAGE",
    "HASH_BYTES",
    "MAX_CHUNK_TOKENS",
    "MAX_GOSSIP_RECORDS",
    "MAX_PREFIX_BYTES",
    "MAX_STAGES",
    "Close",
    "Failed",
    "Gossip",
    "Hidden",
    "Message",
    "Open",
    "Opened",
    "Ping",
    "Pong",
    "Renew",
    "Token",
    "Tokens",
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

ENTRY_STAGE = -1
"""The ``stage`` of a Token that is meant for the entry."""

_INT32 = 2**31 - 1
_LAYERS = 4096
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_peer_or_none = matching(r"([0-9a-f]{40})?", "a peer id of 40 hex digits or nothing")
_peer_id = matching(r"[0-9a-f]{40}", "a peer id of 40 hex digits")
_layer = integer(0, _LAYERS)
_count = integer(0, _INT32)

_Peer: TypeAlias = Annotated[PeerId, _peer_id]
_PeerOrNone: TypeAlias = Annotated[str, _peer_or_none]
_Session: TypeAlias = Annotated[str, matching(r"[0-9A-Za-z_-]{1,64}", "a session id")]
_StageIndex: TypeAlias = Annotated[int, integer(0, MAX_STAGES - 1)]
_Count: TypeAlias = Annotated[int, _count]
_TokenIds: TypeAlias = Annotated[tuple[int, ...], integers(0, _INT32, MAX_CHUNK_TOKENS, least=1)]
_Flag: TypeAlias = Annotated[bool, boolean]
_Reason: TypeAlias = Annotated[str, printable(300)]
_Prefix: TypeAlias = Annotated[bytes, rows_of(HASH_BYTES, MAX_PREFIX_BYTES)]
_Nonce: TypeAlias = Annotated[int, integer(0, 2**64 - 1)]


@dataclass(frozen=True, slots=True)
class Open:
    """Entry → each stage: reserve KV for ``reserve`` tokens and learn the whole chain.

    ``stages`` are (peer, start, end) from layer 0 on without gaps, ``stage`` is the receiver's index in them.
    ``limit`` is the position of the last token that may be generated, ``lease_s`` how long the session lives
    without a Renew. ``prefix`` names the full blocks of what is to be fed, ``upstream`` (8 bytes) what hidden
    states depend on besides: a stage may use blocks that it has kept for this entry under the same names.
    """

    kind: ClassVar[int] = 1
    session: _Session
    stage: _StageIndex
    stages: Annotated[tuple[tuple[PeerId, int, int], ...], items(row(_peer_id, _layer, _layer), MAX_STAGES)]
    entry: _Peer
    reserve: _Count
    temperature: Annotated[float, real(0.0, 1000.0)]
    top_p: Annotated[float, real(0.0, 1.0)]
    top_k: _Count
    seed: Annotated[int, integer(-(2**63), 2**64 - 1)]
    eos: Annotated[tuple[int, ...], integers(0, _INT32, 64)]
    limit: _Count
    lease_s: Annotated[float, real(0.0, 3600.0)]
    prefix: _Prefix = b""
    upstream: Annotated[bytes, rows_of(HASH_BYTES, HASH_BYTES, least=HASH_BYTES)] = bytes(HASH_BYTES)

    def __post_init__(self) -> None:
        reached = 0
        for _, start, end in self.stages:
            if start != reached or end <= start:
                raise FrameError("the stages of a chain follow each other from layer 0 without gaps")
            reached = end
        if self.stage >= len(self.stages):
            raise FrameError(f"stage {self.stage} of a chain of {len(self.stages)}")


@dataclass(frozen=True, slots=True)
class Opened:
    """Stage → entry: the answer to Open.

    ``reason`` says why not; ``unreached`` names the next stage's peer if it is that one that cannot be
    reached from here. ``cached`` is how many of the first tokens need not be fed here.
    """

    kind: ClassVar[int] = 2
    session: _Session
    stage: _StageIndex
    ok: _Flag
    reason: _Reason
    unreached: _PeerOrNone = ""
    cached: _Count = 0


@dataclass(frozen=True, slots=True)
class Tokens:
    """Entry → first stage: a chunk of the prompt whose first token has this ``position``.

    ``sample`` marks the chunk after which the last stage starts to generate.
    """

    kind: ClassVar[int] = 3
    session: _Session
    stage: _StageIndex
    position: _Count
    tokens: _TokenIds
    sample: _Flag


@dataclass(frozen=True, slots=True)
class Hidden:
    """Stage → next stage: hidden states from ``position`` on; ``data`` is row-major, little-endian."""

    kind: ClassVar[int] = 4
    session: _Session
    stage: _StageIndex
    position: _Count
    sample: _Flag
    dtype: Annotated[str, choice(*_ITEM_BYTES)]
    shape: Annotated[tuple[int, ...], items(integer(1, 2**24), 3, least=1)]
    data: Annotated[bytes, binary]

    def __post_init__(self) -> None:
        if math.prod(self.shape) * _ITEM_BYTES[self.dtype] != len(self.data):
            raise FrameError(f"{len(self.data)} bytes are no {self.dtype} tensor of shape {list(self.shape)}")


@dataclass(frozen=True, slots=True)
class Token:
    """Last stage → first stage, and → entry with stage ENTRY_STAGE: the token generated for ``position``.

    ``final`` is "stop" or "length" on the last one of a generation, else empty.
    """

    kind: ClassVar[int] = 5
    session: _Session
    stage: Annotated[int, integer(ENTRY_STAGE, 0)]
    position: _Count
    token: _Count
    final: Annotated[str, choice("", "stop", "length")]


@dataclass(frozen=True, slots=True)
class Failed:
    """Stage → entry: this session cannot go on here; ``unreached`` as in Opened."""

    kind: ClassVar[int] = 6
    session: _Session
    stage: _StageIndex
    reason: _Reason
    unreached: _PeerOrNone = ""


@dataclass(frozen=True, slots=True)
class Close:
    """Entry → stages: the session is over; free what it holds, but keep the blocks that ``prefix`` names
    while there is room.
    """

    kind: ClassVar[int] = 7
    session: _Session
    prefix: _Prefix = b""


@dataclass(frozen=True, slots=True)
class Renew:
    """Entry → stages: the session lives for another lease."""

    kind: ClassVar[int] = 8
    session: _Session


@dataclass(frozen=True, slots=True)
class Ping:
    """Asks for a Pong with the same nonce; the link itself answers."""

    kind: ClassVar[int] = 9
    nonce: _Nonce


@dataclass(frozen=True, slots=True)
class Pong:
    """Answers a Ping."""

    kind: ClassVar[int] = 10
    nonce: _Nonce


@dataclass(frozen=True, slots=True)
class Gossip:
    """Fresh records, as signed and packed by whoever they are about."""

    kind: ClassVar[int] = 11
    records: Annotated[tuple[bytes, ...], items(octets(MAX_RECORD_BYTES), MAX_GOSSIP_RECORDS)]


Message: TypeAlias = Open | Opened | Tokens | Hidden | Token | Failed | Close | Renew | Ping | Pong | Gossip
