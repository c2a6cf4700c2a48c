"""How much records may say, how large they are, and that nobody believes more."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from support.bodies import METRICS, PEER, SWARM

from p2pllm.errors import RecordError
from p2pllm.identity import Identity
from p2pllm.records import (
    MAX_DIRECTORY_BITS,
    MAX_PLAN_PARTS,
    MAX_RECORD_BYTES,
    PLAN_ENTRIES,
    Body,
    ClaimBody,
    PlanBody,
    PlanEntry,
    Span,
    SwarmBody,
    SwarmKey,
    open_record,
    seal,
)

IDENTITY = Identity.from_seed(bytes(32))
SECRET = SwarmKey(b"a key that is long enough")
NOW_MS = 1_800_000_000_000
"""A sequence number as clocks give it."""

CLAIM = ClaimBody(epoch=3, bits=2)
PLAN = PlanBody(3, 7, 0, 2, 2, 5, -1.5, False, (PlanEntry("ab" * 8, 0, 10, 1),))
INDEX = SwarmBody("model", "fingerprint", 30)
BUSY = replace(
    METRICS,
    spans=(Span(0, 10, "ready"), Span(10, 14, "loading")),
    generation=12,
    wait_s=0.004,
    running=5,
    free_kv_blocks=3000,
    cached_kv_blocks=1200,
    memory_used=12 * 2**30,
    upload=9e7,
    rho=tuple((bytes([n] * 8).hex(), 0.01 * n) for n in range(8)),
)
PUBLIC = replace(
    PEER,
    addresses=(
        ("203.0.113.77", 7600),
        ("192.168.178.23", 7600),
        ("2001:db8:4a5b:c6d7:e8f9:a0b1:c2d3:e4f5", 7600),
    ),
    region="eu-central",
    hardware="NVIDIA GeForce RTX 4090",
    memory_bytes=24 * 2**30,
    kv_bytes=4 * 2**30,
)
# No plan can be larger: every field at its limit.
LARGEST_PLAN = PlanBody(
    epoch=2**53,
    number=2**63 - 1,
    part=MAX_PLAN_PARTS - 1,
    parts=MAX_PLAN_PARTS,
    replicas=4096,
    stages=2**63 - 1,
    score=-1e30,
    force=True,
    entries=(PlanEntry("ff" * 8, 4095, 4096, 2**32 - 1),) * PLAN_ENTRIES,
)


def sealed(body: Body, secret: SwarmKey | None = None) -> bytes:
    return seal(IDENTITY, body, swarm=SWARM, seq=NOW_MS, ttl=5.0, secret=secret)


@pytest.mark.parametrize(
    ("body", "limit"), [(BUSY, 330), (PUBLIC, 450), (CLAIM, 160), (INDEX, 200), (LARGEST_PLAN, 999)]
)
def test_records_of_usual_size_stay_small(body: Body, limit: int) -> None:
    assert len(sealed(body)) <= limit


@pytest.mark.parametrize(
    "body", [METRICS, BUSY, PEER, PUBLIC, CLAIM, PLAN, LARGEST_PLAN, INDEX], ids=lambda body: body.kind
)
def test_a_hidden_body_takes_few_bytes_more_and_comes_out(body: Body) -> None:
    plain, hidden = sealed(body), sealed(body, SECRET)
    assert len(plain) < len(hidden) <= len(plain) + 19 < MAX_RECORD_BYTES
    assert open_record(hidden).body(SECRET) == open_record(plain).body()


METRICS_OUT_OF_LIMITS: list[dict[str, Any]] = [
    {"layer_s": math.nan},
    {"layer_s": math.inf},
    {"layer_s": 1e300},
    {"head_s": -0.001},
    {"head_s": 3601.0},
    {"wait_s": 1e9},
    {"running": -1},
    {"running": True},
    {"running": 2**63},
    {"cached_kv_blocks": -1},
    {"generation": 2**32},
    {"upload": math.inf},
    {"upload": -1.0},
    {"spans": (Span(0, 1, "ready"),) * 4},
    {"spans": (Span(5, 5, "ready"),)},
    {"spans": (Span(6, 5, "ready"),)},
    {"spans": (Span(0, 5000, "ready"),)},
    {"spans": (Span(0, 5, "broken"),)},  # type: ignore[arg-type]
    {"rho": (("00" * 8, 0.1),) * 9},
    {"rho": (("00" * 7, 0.1),)},
    {"rho": (("not hexadecimal!", 0.1),)},
    {"rho": (("00" * 8, math.nan),)},
    {"rho": (("00" * 8, 10.1),)},
]
PEER_OUT_OF_LIMITS: list[dict[str, Any]] = [
    {"addresses": (("10.0.0.1", 1),) * 5},
    {"addresses": (("10.0.0.1", 0),)},
    {"addresses": (("10.0.0.1", 70000),)},
    {"addresses": (("", 7600),)},
    {"addresses": (("h" * 256, 7600),)},
    {"addresses": (("10.0.0.1",),)},
    {"region": "x" * 65},
    {"region": "line\nbreak"},
    {"hardware": "\x1b[2Jescape"},
    {"certificate": bytes(31)},
    {"certificate": bytes(33)},
    {"capacity": (1, 2, 3)},
    {"capacity": (1, 2, 3, 4097)},
    {"flops": math.inf},
    {"bandwidth": 1e39},  # more than single precision holds
    {"layer_s": 3601.0},
    {"leaving": 1},
    {"replans": -1},
]
CLAIM_OUT_OF_LIMITS: list[dict[str, Any]] = [
    {"epoch": -1},
    {"epoch": 2**53 + 1},
    {"bits": MAX_DIRECTORY_BITS + 1},
]
PLAN_OUT_OF_LIMITS: list[dict[str, Any]] = [
    {"epoch": 2**53 + 1},
    {"part": 2, "parts": 2},
    {"part": 0, "parts": 0},
    {"part": 0, "parts": MAX_PLAN_PARTS + 1},
    {"score": math.nan},
    {"score": -math.inf},
    {"entries": PLAN.entries[:1] * (PLAN_ENTRIES + 1)},
    {"entries": (PlanEntry("ab" * 8, 3, 3, 0),)},
    {"entries": (PlanEntry("ab" * 8, 0, 4097, 0),)},
    {"entries": (PlanEntry("ab" * 8, 0, 3, 2**32),)},
    {"entries": (PlanEntry("ab" * 20, 0, 3, 0),)},
    {"entries": (PlanEntry("nobody", 0, 3, 0),)},
]


@pytest.mark.parametrize(
    ("body", "change"),
    [
        *((METRICS, change) for change in METRICS_OUT_OF_LIMITS),
        *((PEER, change) for change in PEER_OUT_OF_LIMITS),
        *((CLAIM, change) for change in CLAIM_OUT_OF_LIMITS),
        *((PLAN, change) for change in PLAN_OUT_OF_LIMITS),
    ],
)
def test_what_is_out_of_its_limits_is_neither_sealed_nor_believed(body: Body, change: dict[str, Any]) -> None:
    wrong = replace(body, **change)
    with pytest.raises(RecordError):
        sealed(wrong)
    try:
        packed = wrong.pack()
    except ValueError:
        return  # there is no way to write it at all
    envelope = [2, *msgpack.unpackb(sealed(body))[1:6], packed]
    unsigned = msgpack.packb([*envelope, b""])[:-2]
    record = open_record(unsigned + b"\xc4\x40" + IDENTITY.sign(b"p2pllm record\0" + unsigned))
    with pytest.raises(RecordError):
        record.body()
