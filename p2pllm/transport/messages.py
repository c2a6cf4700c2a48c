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
from p2pllm.records import MAX_RECORD_BYTES
from p2pllm.transport.fields import (
    ENTRY_STAGE,
    HASH_BYTES,
    INT32,
    ITEM_BYTES,
    MAX_GOSSIP_RECORDS,
    Count,
    Flag,
    Generation,
    Nonce,
    Peer,
    PeerOrNone,
    Prefix,
    Reason,
    SessionId,
    StageIndex,
    Stages,
    TokenIds,
    check_chain,
)
from p2pllm.transport.rows import ROUNDED, packed_bytes
from p2pllm.transport.schema import binary, choice, integer, integers, items, octets, real, rows_of

__all__ = [
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
    "Replay",
    "Reroute",
    "Resume",
    "Token",
    "Tokens",
    "Where",
]


@dataclass(frozen=True, slots=True)
class Open:
    """Entry → each new stage: reserve KV for ``reserve`` tokens and learn the whole chain.

    The id of ``session`` ends with ``entry``, or nobody would know whose it is by the frames of stages.
    ``stages`` are (peer, start, end) from layer 0 on without gaps, ``stage`` is the receiver's index in them.
    ``generation`` counts the chains that the session has had: frames of another one than the receiver's are
    dropped. ``limit`` is the position of the last token that may be generated, ``lease_s`` how long the
    session lives without a Renew. ``prefix`` names the full blocks of what is to be fed, ``upstream`` (8
    bytes) what hidden states depend on besides: a stage may use blocks that it has kept for this entry under
    the same names.
    """

    kind: ClassVar[int] = 1
    session: SessionId
    stage: StageIndex
    generation: Generation
    stages: Stages
    entry: Peer
    reserve: Count
    temperature: Annotated[float, real(0.0, 1000.0)]
    top_p: Annotated[float, real(0.0, 1.0)]
    top_k: Count
    seed: Annotated[int, integer(-(2**63), 2**64 - 1)]
    eos: Annotated[tuple[int, ...], integers(0, INT32, 64)]
    limit: Count
    lease_s: Annotated[float, real(0.0, 3600.0)]
    prefix: Prefix = b""
    upstream: Annotated[bytes, rows_of(HASH_BYTES, HASH_BYTES, least=HASH_BYTES)] = bytes(HASH_BYTES)

    def __post_init__(self) -> None:
        check_chain(self.stages, self.stage)


@dataclass(frozen=True, slots=True)
class Opened:
    """Stage → entry: the answer to Open, Reroute and Where.

    ``held`` is how many of the first tokens need not be fed here, ``step_s`` how long the last decode step
    took here (s), or has been taking until now; 0 if there was none.
    """

    kind: ClassVar[int] = 2
    session: SessionId
    stage: StageIndex
    generation: Generation
    held: Count
    step_s: Annotated[float, real(0.0, 1e9)] = 0.0


@dataclass(frozen=True, slots=True)
class Reroute:
    """Entry → each stage that stays: stop, take back what is cached from position ``resume`` on, and learn
    the chain of the next generation. The receiver's layers stay what they were.
    """

    kind: ClassVar[int] = 12
    session: SessionId
    stage: StageIndex
    generation: Generation
    stages: Stages
    resume: Count

    def __post_init__(self) -> None:
        check_chain(self.stages, self.stage)


@dataclass(frozen=True, slots=True)
class Resume:
    """Entry → each stage, once all have answered: send the next stage what it lacks, from ``forward_from``
    on, first of what was sent before, then of what is computed.
    """

    kind: ClassVar[int] = 13
    session: SessionId
    stage: StageIndex
    generation: Generation
    forward_from: Count


@dataclass(frozen=True, slots=True)
class Replay:
    """Entry → stage: go on, and send what was sent for positions [``start``, ``end``) to another one too."""

    kind: ClassVar[int] = 15
    session: SessionId
    stage: StageIndex
    generation: Generation
    peer: Peer
    to_stage: StageIndex
    to_generation: Generation
    start: Count
    end: Count


@dataclass(frozen=True, slots=True)
class Where:
    """Entry → stage: how far are you?"""

    kind: ClassVar[int] = 14
    session: SessionId
    stage: StageIndex
    generation: Generation


@dataclass(frozen=True, slots=True)
class Tokens:
    """Entry → first stage: a chunk of the prompt whose first token has this ``position``.

    ``sample`` marks the chunk after which the last stage starts to generate.
    """

    kind: ClassVar[int] = 3
    session: SessionId
    stage: StageIndex
    generation: Generation
    position: Count
    tokens: TokenIds
    sample: Flag


@dataclass(frozen=True, slots=True)
class Hidden:
    """Stage → next stage: hidden states from ``position`` on; ``data`` is row-major, little-endian, or as
    `pack_rows` rounds it.
    """

    kind: ClassVar[int] = 4
    session: SessionId
    stage: StageIndex
    generation: Generation
    position: Count
    sample: Flag
    dtype: Annotated[str, choice(*ITEM_BYTES, ROUNDED)]
    shape: Annotated[tuple[int, ...], items(integer(1, 2**24), 3, least=1)]
    data: Annotated[bytes, binary]

    def __post_init__(self) -> None:
        is_rounded = self.dtype == ROUNDED
        size = packed_bytes(self.shape) if is_rounded else math.prod(self.shape) * ITEM_BYTES[self.dtype]
        if size != len(self.data):
            raise FrameError(f"{len(self.data)} bytes are no {self.dtype} tensor of shape {list(self.shape)}")


@dataclass(frozen=True, slots=True)
class Token:
    """Last stage → first stage, and → entry with stage ENTRY_STAGE: the token generated for ``position``.

    ``final`` is "stop" or "length" on the last one of a generation, else empty.
    """

    kind: ClassVar[int] = 5
    session: SessionId
    stage: Annotated[int, integer(ENTRY_STAGE, 0)]
    generation: Generation
    position: Count
    token: Count
    final: Annotated[str, choice("", "stop", "length")]


@dataclass(frozen=True, slots=True)
class Failed:
    """Stage → entry: this session cannot go on here.

    With "cut" the link to ``peer``, a neighbour in the chain, has broken, and frames may be lost with it;
    with "unreached" there is no way to it from here; with "leaving" this peer goes soon. In all these cases
    the stage waits for a Reroute with all that it holds, and in the last it works meanwhile. Otherwise it has
    freed everything: it was too "busy", or something is wrong ("broken").
    """

    kind: ClassVar[int] = 6
    session: SessionId
    stage: StageIndex
    generation: Generation
    cause: Annotated[str, choice("broken", "busy", "cut", "leaving", "unreached")]
    reason: Reason
    peer: PeerOrNone = ""


@dataclass(frozen=True, slots=True)
class Close:
    """Entry → stages: the session is over; free what it holds, but keep the blocks that ``prefix`` names
    while there is room.
    """

    kind: ClassVar[int] = 7
    session: SessionId
    prefix: Prefix = b""


@dataclass(frozen=True, slots=True)
class Renew:
    """Entry → stages: the session lives for another lease."""

    kind: ClassVar[int] = 8
    session: SessionId


@dataclass(frozen=True, slots=True)
class Ping:
    """Asks for a Pong with the same nonce; the link itself answers."""

    kind: ClassVar[int] = 9
    nonce: Nonce


@dataclass(frozen=True, slots=True)
class Pong:
    """Answers a Ping."""

    kind: ClassVar[int] = 10
    nonce: Nonce


@dataclass(frozen=True, slots=True)
class Gossip:
    """Fresh records, as signed and packed by whoever they are about."""

    kind: ClassVar[int] = 11
    records: Annotated[tuple[bytes, ...], items(octets(MAX_RECORD_BYTES), MAX_GOSSIP_RECORDS)]


Message: TypeAlias = (
    Open
    | Opened
    | Reroute
    | Resume
    | Replay
    | Where
    | Tokens
    | Hidden
    | Token
    | Failed
    | Close
    | Renew
    | Ping
    | Pong
    | Gossip
)
