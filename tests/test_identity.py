"""Keys, ids and signatures against RFC 8032; identities held by one process at a time."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from p2pllm.errors import UsageError
from p2pllm.identity import Identity, hold_identity, peer_id_of, verify

HOLD_AND_WAIT = """
import sys
from pathlib import Path
from p2pllm.identity import hold_identity
print(hold_identity(Path(sys.argv[1])).identity.peer_id, flush=True)
sys.stdin.read()
"""


def test_key_and_signature_are_those_of_rfc_8032_section_7_1_test_2() -> None:
    identity = Identity.from_seed(
        bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
    )
    public = bytes.fromhex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c")
    signature = bytes.fromhex(
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )
    assert identity.public_key == public
    assert identity.sign(b"\x72") == signature
    assert verify(public, b"\x72", signature)


def test_peer_id_is_the_sha1_of_the_public_key() -> None:
    identity = Identity.generate()
    assert (
        identity.peer_id == hashlib.sha1(identity.public_key).hexdigest() == peer_id_of(identity.public_key)
    )
    assert identity.node_id.hex() == identity.peer_id


def test_a_signature_of_anything_else_does_not_verify() -> None:
    identity, other = Identity.generate(), Identity.generate()
    signature = identity.sign(b"message")
    assert not verify(identity.public_key, b"massage", signature)
    assert not verify(other.public_key, b"message", signature)
    assert not verify(identity.public_key, b"message", signature[:-1])
    assert not verify(identity.public_key[:-1], b"message", signature)
    assert not verify(b"", b"message", b"")


def test_each_holder_takes_the_first_free_identity_and_keeps_it(tmp_path: Path) -> None:
    first, second = hold_identity(tmp_path), hold_identity(tmp_path)
    assert first.identity.peer_id != second.identity.peer_id
    assert first.local_peers == second.local_peers == 2
    first.close()
    assert second.local_peers == 1
    with hold_identity(tmp_path) as again:
        assert again.identity.peer_id == first.identity.peer_id
    second.close()
    assert sorted(path.name for path in tmp_path.glob("*.key")) == ["identity-0.key", "identity-1.key"]


def test_what_only_looks_like_an_identity_is_not_counted(tmp_path: Path) -> None:
    with hold_identity(tmp_path) as held:
        (tmp_path / "identity-5.key").mkdir()
        (tmp_path / "identity-6.key").symlink_to(tmp_path / "gone")
        assert held.local_peers == 1


def test_the_private_key_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    data_dir = tmp_path / "new" / "directory"
    with hold_identity(data_dir):
        assert stat.S_IMODE((data_dir / "identity-0.key").stat().st_mode) == 0o600
        assert stat.S_IMODE(data_dir.stat().st_mode) & 0o077 == 0


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_key_that_others_could_read_is_closed_to_them(tmp_path: Path, mode: int) -> None:
    hold_identity(tmp_path).close()
    path = tmp_path / "identity-0.key"
    path.chmod(mode)
    with capture_logs() as logs, hold_identity(tmp_path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [(entry["event"], entry["mode"]) for entry in logs] == [
        ("identity_was_open_to_others", f"{mode:04o}")
    ]
    with capture_logs() as logs, hold_identity(tmp_path):
        assert logs == []


def test_what_belongs_to_an_identity_lies_beside_its_key(tmp_path: Path) -> None:
    with hold_identity(tmp_path) as first, hold_identity(tmp_path) as second:
        assert [held.state_path for held in (first, second)] == [
            tmp_path / "identity-0.json",
            tmp_path / "identity-1.json",
        ]


@contextlib.contextmanager
def holder(data_dir: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Another process that holds an identity, and the peer id."""
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD_AND_WAIT, str(data_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child.stdin, child.stdout:
        try:
            yield child, child.stdout.readline().strip()
        finally:
            child.kill()
            child.wait(10)


def test_an_identity_is_free_again_when_its_process_was_killed(tmp_path: Path) -> None:
    with holder(tmp_path) as (child, held_there):
        with hold_identity(tmp_path) as here:
            assert here.identity.peer_id != held_there
            assert here.local_peers == 2
        child.kill()
        child.wait(10)
        with hold_identity(tmp_path) as here:
            assert here.identity.peer_id == held_there
            assert here.local_peers == 1


def test_who_wants_the_only_identity_is_told_which_process_has_it(tmp_path: Path) -> None:
    with holder(tmp_path) as (child, held_there):
        with pytest.raises(
            UsageError, match=rf"in use by process {child.pid}: stop that one, or .* --data-dir"
        ):
            hold_identity(tmp_path, alone=True)
        assert [path.name for path in tmp_path.glob("*.key")] == ["identity-0.key"]
        child.kill()
        child.wait(10)
        with hold_identity(tmp_path, alone=True) as here:  # the pid of the dead process is no obstacle
            assert here.identity.peer_id == held_there
            with pytest.raises(UsageError, match=f"in use by process {os.getpid()}:"):
                hold_identity(tmp_path, alone=True)
    assert list(tmp_path.glob("*.pid")) == []


def test_a_process_that_left_no_name_still_holds_its_identity(tmp_path: Path) -> None:
    with hold_identity(tmp_path):
        (tmp_path / "identity-0.pid").write_text("not a number")
        with pytest.raises(UsageError, match="in use by another process:"):
            hold_identity(tmp_path, alone=True)
        (tmp_path / "identity-0.pid").unlink()
        with pytest.raises(UsageError, match="in use by another process:"):
            hold_identity(tmp_path, alone=True)


def test_a_damaged_key_file_is_named_and_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "identity-0.key"
    path.write_bytes(b"too short")
    with pytest.raises(UsageError, match=r"identity-0\.key is not a p2pllm identity: move it away"):
        hold_identity(tmp_path)
    assert path.read_bytes() == b"too short"


def test_a_directory_that_cannot_be_made_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match="choose another --data-dir"):
        hold_identity(tmp_path / "file")
