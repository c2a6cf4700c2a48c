"""Records: what was sealed comes out as it went in, and nothing else comes out at all."""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import assume, given
from hypothesis import strategies as st
from support.bodies import METRICS, PEER, SWARM

from p2pllm.errors import RecordError
from p2pllm.identity import Identity
from p2pllm.records import (
    MAX_DIRECTORY_BITS,
    MAX_PLAN_PARTS,
    MAX_RECORD_BYTES,
    MAX_TTL_S,
    PLAN_ENTRIES,
    Body,
    ClaimBody,
    MetricsBody,
    PeerBody,
    PlanBody,
    PlanEntry,
    Span,
    SwarmBody,
    SwarmKey,
    open_record,
    peek,
    seal,
)

IDENTITY = Identity.from_seed(bytes(32))
SECRET = SwarmKey(b"a key that is long enough")

CLAIM = ClaimBody(epoch=3, bits=2)
PLAN = PlanBody(
    epoch=3,
    number=7,
    part=0,
    parts=2,
    replicas=2,
    stages=5,
    score=-1.5,
    force=False,
    entries=(PlanEntry("ab" * 8, 0, 10, 1), PlanEntry("cd" * 8, 10, 30, 0)),
)
INDEX = SwarmBody("model", "fingerprint", 30)
BODIES = (PEER, METRICS, CLAIM, PLAN, INDEX)

counts = st.integers(0, 2**63 - 1)
layers = st.integers(0, 4096)
# What travels has single precision.
numbers = st.floats(0, allow_nan=False, allow_infinity=False, width=32)
seconds = st.floats(0, 3600, width=32)
prefixes = st.binary(min_size=8, max_size=8).map(bytes.hex)
slices = st.tuples(layers, layers).filter(lambda ends: ends[0] < ends[1])


def texts(limit: int) -> st.SearchStrategy[str]:
    return st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=limit)


spans = st.builds(
    lambda ends, state: Span(*ends, state), slices, st.sampled_from(["loading", "ready", "draining"])
)
peers = st.builds(
    PeerBody,
    addresses=st.lists(st.tuples(texts(40).filter(bool), st.integers(1, 65535)), max_size=4).map(tuple),
    region=texts(64),
    hardware=texts(96),
    certificate=st.just(b"") | st.binary(min_size=32, max_size=32),
    memory_bytes=counts,
    flops=numbers,
    bandwidth=numbers,
    capacity=st.tuples(layers, layers, layers, layers),
    kv_bytes=counts,
    layer_s=seconds,
    head_s=seconds,
    dtype=texts(16),
    quantization=texts(16),
    software=texts(32),
    leaving=st.booleans(),
    paused=st.booleans(),
    pinned=st.booleans(),
    replans=counts,
    force=st.booleans(),
)
metrics = st.builds(
    MetricsBody,
    spans=st.lists(spans, max_size=3).map(tuple),
    generation=st.integers(0, 2**32 - 1),
    layer_s=seconds,
    head_s=seconds,
    wait_s=seconds,
    running=counts,
    waiting=counts,
    free_kv_blocks=counts,
    cached_kv_blocks=counts,
    memory_used=counts,
    upload=numbers,
    rho=st.lists(st.tuples(prefixes, st.floats(0, 10, width=32)), max_size=8).map(tuple),
)
claims = st.builds(ClaimBody, epoch=st.integers(0, 2**53), bits=st.integers(0, MAX_DIRECTORY_BITS))
entries = st.builds(
    lambda peer, ends, generation: PlanEntry(peer, *ends, generation),
    prefixes,
    slices,
    st.integers(0, 2**32 - 1),
)
plans = st.builds(
    PlanBody,
    epoch=st.integers(0, 2**53),
    number=counts,
    part=st.integers(0, 127),
    parts=st.integers(128, MAX_PLAN_PARTS),
    replicas=layers,
    stages=counts,
    score=st.floats(allow_nan=False, allow_infinity=False, width=32),
    force=st.booleans(),
    entries=st.lists(entries, max_size=PLAN_ENTRIES).map(tuple),
)
swarms = st.builds(SwarmBody, model=texts(128), fingerprint=texts(128), layers=layers)
bodies = st.one_of(peers, metrics, claims, plans, swarms)


def sealed(body: Body = METRICS, seq: int = 1, ttl: float = 5.0) -> bytes:
    return seal(IDENTITY, body, swarm=SWARM, seq=seq, ttl=ttl)


def signed(envelope: list[Any]) -> bytes:
    """Any envelope, however wrong, with a true signature: written from the format's description alone."""
    unsigned = msgpack.packb([*envelope, b""])[:-2]
    return unsigned + b"\xc4\x40" + IDENTITY.sign(b"p2pllm record\0" + unsigned)


def envelope_of(raw: bytes) -> list[Any]:
    return list(msgpack.unpackb(raw))[:-1]


def refused(envelope: list[Any], secret: SwarmKey | None = None) -> None:
    """What the envelope says is not believed, although it is truly signed."""
    raw = signed(envelope)
    with pytest.raises(RecordError):
        open_record(raw).body(secret)


@given(bodies, counts, st.integers(1, 600_000))
def test_what_was_sealed_comes_out(body: Body, seq: int, ttl_ms: int) -> None:
    record = open_record(raw := sealed(body, seq, ttl_ms / 1000))
    assert len(raw) <= MAX_RECORD_BYTES
    assert (record.kind, record.body(), record.seq, record.raw) == (body.kind, body, seq, raw)
    assert record.ttl == pytest.approx(ttl_ms / 1000)
    assert (record.swarm, record.public_key) == (SWARM, IDENTITY.public_key)
    assert record.peer_id == hashlib.sha1(IDENTITY.public_key).hexdigest()
    header = peek(raw)
    assert (header.kind, header.swarm, header.public_key, header.seq, header.ttl, header.peer_id) == (
        record.kind,
        record.swarm,
        record.public_key,
        record.seq,
        record.ttl,
        record.peer_id,
    )


def test_the_envelope_is_the_documented_array_and_the_signature_covers_all_before_it() -> None:
    version, kind, swarm, public_key, seq, ttl_ms, body, signature = msgpack.unpackb(raw := sealed(seq=7))
    assert (version, kind, swarm, public_key, seq, ttl_ms) == (2, 2, SWARM, IDENTITY.public_key, 7, 5000)
    layer_s, head_s = (struct.unpack(">f", struct.pack(">f", value))[0] for value in (0.001, 0.002))
    assert body == [[[0, 10, 1]], 0, layer_s, head_s, 0.0, 0, 0, 100, 0, 2**20, 0.0, b""]
    Ed25519PublicKey.from_public_bytes(public_key).verify(signature, b"p2pllm record\0" + raw[:-66])


@given(st.integers(0, len(sealed()) - 1), st.integers(1, 255))
def test_no_byte_can_be_changed(position: int, difference: int) -> None:
    raw = bytearray(sealed())
    raw[position] ^= difference
    with pytest.raises(RecordError):
        open_record(bytes(raw))


@given(st.integers(0, len(sealed()) - 1))
def test_no_part_of_a_record_is_a_record(length: int) -> None:
    with pytest.raises(RecordError):
        open_record(sealed()[:length])


@given(st.binary(min_size=1, max_size=20))
def test_nothing_can_be_appended(more: bytes) -> None:
    with pytest.raises(RecordError):
        open_record(sealed() + more)


@given(st.binary(max_size=1200))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(RecordError):
        open_record(noise)


def test_a_record_over_the_limit_is_refused_before_it_is_unpacked() -> None:
    with pytest.raises(RecordError, match="over the limit of 1000"):
        open_record(b"\xdd\xff\xff\xff\xff" + bytes(MAX_RECORD_BYTES))


def test_a_length_that_lies_allocates_nothing() -> None:
    with pytest.raises(RecordError):
        open_record(b"\xdd\xff\xff\xff\xff")


def test_a_signature_by_another_key_is_refused() -> None:
    envelope = envelope_of(sealed())
    envelope[3] = Identity.generate().public_key
    with pytest.raises(RecordError, match="signature is not by the key it names"):
        open_record(signed(envelope))


def test_a_signature_in_a_longer_encoding_is_refused() -> None:
    unsigned = msgpack.packb([*envelope_of(sealed()), b""])[:-2]
    raw = unsigned + b"\xc5\x00\x40" + IDENTITY.sign(b"p2pllm record\0" + unsigned)
    with pytest.raises(RecordError, match="shortest form"):
        open_record(raw)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)


@given(st.sampled_from(BODIES), st.integers(0, 5), values)
def test_a_signed_envelope_with_a_field_of_another_type_is_a_record_error(
    body: Body, position: int, value: object
) -> None:
    envelope = envelope_of(sealed(body))
    assume(type(value) is not type(envelope[position]))
    envelope[position] = value
    with pytest.raises(RecordError):
        open_record(signed(envelope))


@given(st.sampled_from(BODIES), values)
def test_a_signed_body_of_another_type_is_a_record_error(body: Body, value: object) -> None:
    assume(not isinstance(value, list) or len(value) not in (2, 3))  # there may be a claim or an index in it
    envelope = envelope_of(sealed(body))
    envelope[6] = value
    refused(envelope)
    refused(envelope, SECRET)


@given(st.sampled_from(BODIES), st.data())
def test_a_signed_body_with_a_field_of_another_type_is_a_record_error(
    body: Body, data: st.DataObject
) -> None:
    envelope = envelope_of(sealed(body))
    position = data.draw(st.integers(0, len(envelope[6]) - 1))
    value = data.draw(values)
    assume(type(value) is not type(envelope[6][position]))
    envelope[6][position] = value
    refused(envelope)


def test_a_body_that_makes_the_record_too_large_is_not_sealed() -> None:
    with pytest.raises(RecordError, match="over the limit of 1000"):
        sealed(replace(PEER, addresses=(("h" * 250, 7600),) * 4))


@pytest.mark.parametrize("ttl", [0.0, -1.0, MAX_TTL_S + 1, math.nan, math.inf])
def test_a_life_that_is_none_or_too_long_is_refused(ttl: float) -> None:
    with pytest.raises(RecordError):
        sealed(ttl=ttl)


@pytest.mark.parametrize("swarm", [b"", bytes(19), bytes(21)])
def test_a_swarm_id_has_20_bytes(swarm: bytes) -> None:
    with pytest.raises(RecordError):
        seal(IDENTITY, METRICS, swarm=swarm, seq=1, ttl=5.0)


@pytest.mark.parametrize(("position", "value", "says"), [(0, 1, "version 1"), (1, 9, "unknown kind 9")])
def test_what_this_peer_does_not_know_is_named(position: int, value: int, says: str) -> None:
    envelope = envelope_of(sealed())
    envelope[position] = value
    with pytest.raises(RecordError, match=says):
        open_record(signed(envelope))
