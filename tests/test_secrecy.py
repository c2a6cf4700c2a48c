"""Private swarms: without the key nothing can be found, read, or added."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

import msgpack
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESSIV
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from support.bodies import SWARM, metrics_body

from p2pllm.errors import RecordError, UsageError
from p2pllm.identity import Identity
from p2pllm.records import SwarmKey, open_record, read_swarm_key, seal, swarm_id

IDENTITY = Identity.from_seed(bytes(32))
KEY = b"correct horse battery staple"
SECRET, OTHER = SwarmKey(KEY), SwarmKey(KEY + b"!")
BODY = metrics_body(layer_s=0.25, head_s=0.5)
HIDDEN = seal(IDENTITY, BODY, swarm=SWARM, seq=7, ttl=5, secret=SECRET)


def with_body(
    body: object, *, kind: int = 2, swarm: bytes = SWARM, seq: int = 7, by: Identity = IDENTITY
) -> bytes:
    """A truly signed record with any body."""
    unsigned = msgpack.packb([2, kind, swarm, by.public_key, seq, 5000, body, b""])[:-2]
    return unsigned + b"\xc4\x40" + by.sign(b"p2pllm record\0" + unsigned)


def body_of(raw: bytes) -> bytes:
    return bytes(msgpack.unpackb(raw)[6])


def test_the_body_is_hidden_as_documented() -> None:
    key = HKDF(SHA256(), 64, None, b"p2pllm records").derive(KEY)
    context = msgpack.packb([2, SWARM, IDENTITY.public_key, 7])
    plain = AESSIV(key).decrypt(body_of(HIDDEN), [context])
    assert plain == msgpack.packb(BODY.pack(), use_single_float=True)
    assert plain not in HIDDEN


def test_members_read_what_others_cannot() -> None:
    record = open_record(HIDDEN)
    assert record.body(SECRET) == BODY
    with pytest.raises(RecordError, match="not sealed with this swarm's key"):
        record.body(OTHER)
    with pytest.raises(RecordError, match="of a private swarm is sealed"):
        record.body()


def test_a_private_swarm_takes_nothing_in_the_open() -> None:
    plain = open_record(seal(IDENTITY, BODY, swarm=SWARM, seq=7, ttl=5))
    with pytest.raises(RecordError, match="of a private swarm is sealed, others are not"):
        plain.body(SECRET)


@pytest.mark.parametrize(
    "moved",
    [
        {"kind": 1},
        {"swarm": bytes(20)},
        {"seq": 8},
        {"by": Identity.from_seed(bytes([1] * 32))},
    ],
    ids=str,
)
def test_a_hidden_body_is_good_only_where_it_was_sealed(moved: dict[str, object]) -> None:
    open_record(with_body(body_of(HIDDEN))).body(SECRET)
    copied = open_record(with_body(body_of(HIDDEN), **moved))  # type: ignore[arg-type]
    with pytest.raises(RecordError, match="not sealed with this swarm's key"):
        copied.body(SECRET)


@given(st.integers(0, len(body_of(HIDDEN)) - 1), st.integers(1, 255))
def test_no_byte_of_a_hidden_body_can_be_changed(position: int, difference: int) -> None:
    body = bytearray(body_of(HIDDEN))
    body[position] ^= difference
    with pytest.raises(RecordError, match="not sealed with this swarm's key"):
        open_record(with_body(bytes(body))).body(SECRET)


@given(st.binary(max_size=100))
def test_noise_is_not_a_hidden_body(noise: bytes) -> None:
    with pytest.raises(RecordError, match="not sealed with this swarm's key"):
        open_record(with_body(noise)).body(SECRET)


@pytest.mark.parametrize("packed", [b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x90", b"\xc0"])
def test_what_a_member_hid_is_checked_like_anything_else(packed: bytes) -> None:
    context = msgpack.packb([2, SWARM, IDENTITY.public_key, 7])
    with pytest.raises(RecordError):
        open_record(with_body(SECRET.hide(packed, context))).body(SECRET)


def test_a_private_swarm_has_an_id_that_only_its_key_gives() -> None:
    expected = hmac.new(KEY, b"p2pllm swarm\0fingerprint", hashlib.sha256).digest()[:20]
    ids = {SECRET.swarm_id("fingerprint"), OTHER.swarm_id("fingerprint"), swarm_id("fingerprint")}
    assert SECRET.swarm_id("fingerprint") == expected
    assert len(ids) == 3
    assert SECRET.swarm_id("another") not in ids


def test_a_proof_is_made_with_the_key_and_for_one_transcript() -> None:
    assert SECRET.proof(b"said") == hmac.new(KEY, b"p2pllm link\0said", hashlib.sha256).digest()
    assert len({SECRET.proof(b"said"), OTHER.proof(b"said"), SECRET.proof(b"other")}) == 3


def test_a_key_is_read_without_the_white_space_around_it(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_bytes(b"\n" + KEY + b" \r\n")
    with capture_logs() as logs:
        assert read_swarm_key(path).swarm_id("model") == SECRET.swarm_id("model")
    assert logs == []


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_key_that_others_can_reach_is_worth_a_warning(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    path.write_bytes(KEY)
    path.chmod(mode)
    with capture_logs() as logs:
        read_swarm_key(path)
    assert [(entry["event"], entry["mode"]) for entry in logs] == [
        ("swarm_key_open_to_others", f"{mode:04o}")
    ]


@pytest.mark.parametrize(
    ("content", "says"), [(b"", "0 bytes"), (b"x" * 15, "15 bytes"), (b"x" * 5000, "4097")]
)
def test_a_key_that_is_too_short_or_no_key_at_all_is_refused(
    tmp_path: Path, content: bytes, says: str
) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=f"has {says}.*openssl rand -hex 32"):
        read_swarm_key(path)


def test_a_key_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(UsageError, match=f"cannot read --swarm-key-file {path}"):
            read_swarm_key(path)
