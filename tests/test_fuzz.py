"""Long fuzzing of everything that reads what strangers send: nothing but its own kind of error may come
out.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from support.bodies import SWARM, metrics_body, peer_body

from p2pllm.errors import FrameError, RecordError
from p2pllm.identity import Identity
from p2pllm.records import (
    ClaimBody,
    PlanBody,
    PlanEntry,
    Record,
    Span,
    SwarmBody,
    SwarmKey,
    open_record,
    peek,
    seal,
)
from p2pllm.transport import (
    Close,
    Failed,
    Gossip,
    Hidden,
    Open,
    Opened,
    Ping,
    Renew,
    Replay,
    Reroute,
    Resume,
    Token,
    Tokens,
    Where,
    decode,
    encode,
)

PEER = "ab" * 20
MESSAGES = (
    Open("s", 1, 0, ((PEER, 0, 4), ("cd" * 20, 4, 30)), PEER, 300, 0.7, 0.9, 40, 7, (1, 2), 512, 10.0),
    Opened("s", 1, 2, 48, 0.02),
    Reroute("s", 1, 3, ((PEER, 0, 4), ("cd" * 20, 4, 30)), 17),
    Resume("s", 1, 3, 16),
    Replay("s", 1, 3, PEER, 2, 4, 0, 48),
    Where("s", 1, 3),
    Tokens("s", 0, 0, 17, tuple(range(200)), True),
    Hidden("s", 1, 0, 17, True, "bfloat16", (3, 16), bytes(range(96))),
    Token("s", -1, 0, 17, 99, "stop"),
    Failed("s", 1, 0, "unreached", "why", PEER),
    Close("s"),
    Renew("s"),
    Ping(2**63),
    Gossip((bytes(range(200)), b"record" * 20)),
)
IDENTITY = Identity.from_seed(bytes(32))
SECRET = SwarmKey(bytes(32))
RECORDS = tuple(
    seal(IDENTITY, body, swarm=SWARM, seq=5, ttl=30, secret=secret)
    for body in (
        peer_body(addresses=(("example.org", 7600), ("2001:db8::1", 1))),
        metrics_body(spans=(Span(0, 3, "loading"), Span(3, 9, "ready")), rho=(("ab" * 8, 0.01),)),
        ClaimBody(epoch=3, bits=2),
        PlanBody(
            3, 7, 0, 2, 1, 2, 0.5, False, (PlanEntry("ab" * 8, 0, 10, 1), PlanEntry("cd" * 8, 9, 30, 0))
        ),
        SwarmBody("model", "fingerprint", 30),
    )
    for secret in (None, SECRET)
)


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Flip, cut, repeat, insert, or splice a few bytes."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, size = rng.randrange(len(changed) + 1), rng.randint(1, 8)
        match rng.randrange(5):
            case 0 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                del changed[at : at + size]
            case 2:
                changed[at:at] = changed[at : at + size] * rng.randint(1, 100)
            case 3:
                changed[at:at] = rng.randbytes(size)
            case _:
                changed[at : at + size] = rng.choice(
                    (b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xdf" * 4, b"\xc7\xff")
                )
    return bytes(changed)


def fuzz(
    read: Callable[[bytes], object], seeds: tuple[bytes, ...], error: type[Exception], rounds: int
) -> None:
    rng = random.Random(20260801)
    refused = 0
    for _ in range(rounds):
        data = mutate(rng, rng.choice(seeds))
        try:
            read(data)
        except error:
            refused += 1
    assert refused > rounds // 2


@pytest.mark.parametrize("rounds", [2_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_frames(rounds: int) -> None:
    fuzz(decode, tuple(map(encode, MESSAGES)), FrameError, rounds)


def unsigned_body(raw: bytes) -> object:
    """What a record with these bytes would say if they were signed."""
    header = peek(raw)
    record = Record(header.kind, header.swarm, header.public_key, header.peer_id, header.seq, header.ttl, raw)
    return record.body()


@pytest.mark.parametrize("rounds", [2_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_records(rounds: int) -> None:
    fuzz(peek, RECORDS, RecordError, rounds)
    fuzz(unsigned_body, RECORDS, RecordError, rounds)
    fuzz(open_record, RECORDS, RecordError, rounds // 100)


def test_the_seeds_are_good() -> None:
    assert tuple(decode(encode(message)) for message in MESSAGES) == MESSAGES
    assert all(
        open_record(record).body(secret) for record, secret in zip(RECORDS, (None, SECRET) * 5, strict=True)
    )
