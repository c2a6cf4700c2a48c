"""Records: what was sealed comes out as it went in, and nothing else comes out at all."""

from __future__ import annotations

import hashlib
import math
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
    MAX_RECORD_BYTES,
    MAX_TTL_S,
    Body,
    MetricsBody,
    PeerBody,
    Span,
    SwarmBody,
    directory_key,
    open_record,
    peek,
    seal,
    swarm_id,
    swarms_key,
)

IDENTITY = Identity.from_seed(bytes(32))

counts = st.integers(0, 2**63 - 1)
numbers = st.floats(0, allow_nan=False, allow_infinity=False)
seconds = st.floats(0, 3600)


def texts(limit: int) -> st.SearchStrategy[str]:
    return st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=limit)


spans = st.builds(
    lambda start, length, state: Span(start, start + length, state),
    st.integers(0, 2000),
    st.integers(1, 2000),
    st.sampled_from(["loading", "ready", "draining"]),
)
peers = st.builds(
    PeerBody,
    addresses=st.lists(st.tuples(texts(40).filter(bool), st.integers(1, 65535)), max_size=4).map(tuple),
    region=texts(64),
    hardware=texts(96),
    memory_bytes=counts,
    flops=numbers,
    bandwidth=numbers,
    capacity=st.integers(0, 4096),
    dtype=texts(16),
    quantization=texts(16),
    software=texts(32),
    leaving=st.booleans(),
)
metrics = st.builds(
    MetricsBody,
    spans=st.lists(spans, max_size=3).map(tuple),
    generation=counts,
    layer_s=seconds,
    head_s=seconds,
    wait_s=seconds,
    running=counts,
    waiting=counts,
    free_kv_blocks=counts,
    memory_used=counts,
    rho=st.lists(
        st.tuples(st.binary(min_size=8, max_size=8).map(bytes.hex), st.floats(0, 10)), max_size=8
    ).map(tuple),
)
swarms = st.builds(SwarmBody, model=texts(128), fingerprint=texts(128), layers=st.integers(0, 4096))
bodies = st.one_of(peers, metrics, swarms)


def sealed(body: Body = METRICS, seq: int = 1, ttl: float = 5.0) -> bytes:
    return seal(IDENTITY, body, swarm=SWARM, seq=seq, ttl=ttl)


def signed(envelope: list[Any]) -> bytes:
    """Any envelope, however wrong, with a true signature: written from the format's description alone."""
    unsigned = msgpack.packb([*envelope, b""])[:-2]
    return unsigned + b"\xc4\x40" + IDENTITY.sign(b"p2pllm record\0" + unsigned)


def envelope_of(raw: bytes) -> list[Any]:
    return list(msgpack.unpackb(raw))[:-1]


@given(bodies, counts, st.integers(1, 600_000))
def test_what_was_sealed_comes_out(body: Body, seq: int, ttl_ms: int) -> None:
    record = open_record(raw := sealed(body, seq, ttl_ms / 1000))
    assert len(raw) <= MAX_RECORD_BYTES
    assert (record.kind, record.body, record.seq, record.raw) == (body.kind, body, seq, raw)
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
    assert (version, kind, swarm, public_key, seq, ttl_ms) == (1, 2, SWARM, IDENTITY.public_key, 7, 5000)
    assert body == METRICS.pack()
    Ed25519PublicKey.from_public_bytes(public_key).verify(signature, b"p2pllm record\0" + raw[:-66])


def test_records_of_usual_size_stay_under_400_bytes() -> None:
    full = replace(
        METRICS,
        spans=tuple(Span(start, start + 10, "ready") for start in (0, 10, 20)),
        rho=tuple((bytes([n] * 8).hex(), 0.01) for n in range(8)),
    )
    assert len(sealed(full, seq=1_800_000_000_000)) <= 400
    assert len(sealed(PEER, seq=1_800_000_000_000)) <= 400


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


@given(st.sampled_from([METRICS, PEER]), st.integers(0, 6), values)
def test_a_signed_envelope_with_a_field_of_another_type_is_a_record_error(
    body: Body, position: int, value: object
) -> None:
    envelope = envelope_of(sealed(body))
    assume(type(value) is not type(envelope[position]))
    envelope[position] = value
    with pytest.raises(RecordError):
        open_record(signed(envelope))


@given(st.sampled_from([METRICS, PEER]), st.data())
def test_a_signed_body_with_a_field_of_another_type_is_a_record_error(
    body: Body, data: st.DataObject
) -> None:
    envelope = envelope_of(sealed(body))
    position = data.draw(st.integers(0, len(envelope[6]) - 1))
    value = data.draw(values)
    assume(type(value) is not type(envelope[6][position]))
    envelope[6][position] = value
    with pytest.raises(RecordError):
        open_record(signed(envelope))


@pytest.mark.parametrize(
    "change",
    [
        {"layer_s": math.nan},
        {"layer_s": math.inf},
        {"head_s": -0.001},
        {"running": -1},
        {"running": True},
        {"running": 2**63},
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
        {"layer_s": 1e300},
        {"head_s": 3601.0},
        {"wait_s": 1e9},
    ],
)
def test_metrics_out_of_their_limits_are_neither_sealed_nor_opened(change: dict[str, Any]) -> None:
    body = replace(METRICS, **change)
    with pytest.raises(RecordError):
        sealed(body)
    try:
        packed = body.pack()
    except ValueError:
        return  # there is no way to write it at all
    envelope = envelope_of(sealed())
    envelope[6] = packed
    with pytest.raises(RecordError):
        open_record(signed(envelope))


@pytest.mark.parametrize(
    "change",
    [
        {"addresses": (("10.0.0.1", 1),) * 5},
        {"addresses": (("10.0.0.1", 0),)},
        {"addresses": (("10.0.0.1", 70000),)},
        {"addresses": (("", 7600),)},
        {"addresses": (("h" * 256, 7600),)},
        {"addresses": (("10.0.0.1",),)},
        {"region": "x" * 65},
        {"region": "line\nbreak"},
        {"hardware": "\x1b[2Jescape"},
        {"capacity": 4097},
        {"flops": math.inf},
        {"leaving": 1},
    ],
)
def test_a_peer_out_of_its_limits_is_neither_sealed_nor_opened(change: dict[str, Any]) -> None:
    body = replace(PEER, **change)
    with pytest.raises(RecordError):
        sealed(body)
    envelope = envelope_of(sealed(PEER))
    envelope[6] = body.pack()
    with pytest.raises(RecordError):
        open_record(signed(envelope))


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


@pytest.mark.parametrize(("position", "value", "says"), [(0, 2, "version 2"), (1, 3, "unknown kind 3")])
def test_what_this_peer_does_not_know_is_named(position: int, value: int, says: str) -> None:
    envelope = envelope_of(sealed())
    envelope[position] = value
    with pytest.raises(RecordError, match=says):
        open_record(signed(envelope))


def test_keys_are_20_bytes_and_tell_swarms_and_purposes_apart() -> None:
    one, two = swarm_id("fingerprint one"), swarm_id("fingerprint two")
    keys = {one, two, directory_key(one), directory_key(two), swarms_key()}
    assert len(keys) == 5
    assert {len(key) for key in keys} == {20}


def test_a_record_belongs_under_one_key() -> None:
    assert peek(sealed(METRICS)).key == peek(sealed(PEER)).key == directory_key(SWARM)
    assert peek(sealed(SwarmBody("model", "fingerprint", 30))).key == swarms_key()
