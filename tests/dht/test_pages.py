"""What travels of a key: digests and names in a fixed form, records with lives; noise never raises."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.bodies import METRICS, record

from p2pllm.dht.pages import (
    DIGEST_BYTES,
    SLOT_BYTES,
    Digest,
    pack_digests,
    pack_records,
    pack_slots,
    parse_digests,
    parse_records,
    parse_slots,
)
from p2pllm.dht.proof import is_proven, prove
from p2pllm.identity import Identity

PEER_ID = "ab" * 20


def test_a_digest_is_owner_kind_number_and_life() -> None:
    digest = Digest(PEER_ID, "metrics", 0x0102, 1.5)
    packed = b"\xab" * 20 + b"\1" + bytes(6) + b"\1\2" + (1500).to_bytes(4)
    assert pack_digests([digest]) == packed
    assert len(packed) == DIGEST_BYTES
    assert parse_digests(packed * 2 + packed[:-1]) == [digest, digest]
    assert digest.slot == (PEER_ID, "metrics")


def test_a_name_is_owner_and_kind() -> None:
    packed = b"\xab" * 20 + b"\0"
    assert pack_slots([(PEER_ID, "peer")]) == packed
    assert len(packed) == SLOT_BYTES
    assert parse_slots(packed + packed[:-1]) == [(PEER_ID, "peer")]


def test_a_kind_that_nobody_knows_is_left_out() -> None:
    assert parse_digests(bytes(20) + b"\xff" + bytes(12)) == []
    assert parse_slots(bytes(20) + b"\5") == []


def test_records_travel_with_the_life_they_have_left() -> None:
    one = record(Identity.generate(), METRICS, seq=7)
    assert parse_records(pack_records([(one, 1.25)])) == [(one.raw, 1.25)]
    assert Digest.of((one, 1.25)) == Digest(one.peer_id, "metrics", 7, 1.25)
    assert parse_records([[1, "text"], [b"raw", 1], [1000, b"raw"], 7, [], None]) == [(b"raw", 1.0)]


@given(st.binary(max_size=1500))
def test_noise_never_raises(noise: bytes) -> None:
    assert len(parse_digests(noise)) <= len(noise) // DIGEST_BYTES
    assert len(parse_slots(noise)) <= len(noise) // SLOT_BYTES


def test_a_proof_is_good_for_one_question_between_two_nodes() -> None:
    identity, asker, nonce = Identity.generate(), b"a" * 20, b"n" * 20
    proof = prove(identity, nonce, asker)
    assert is_proven(proof, nonce, asker, identity.node_id)
    assert not is_proven(proof, b"m" * 20, asker, identity.node_id)
    assert not is_proven(proof, nonce, b"b" * 20, identity.node_id)
    assert not is_proven(proof, nonce, asker, Identity.generate().node_id)
    assert not is_proven(None, nonce, asker, identity.node_id)
