"""What a peer remembers: back after a restart, never half written, and never a reason not to start."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from p2pllm.state import MAX_PEERS, Remembered

PEERS = [("192.0.2.1", 7600), ("2001:db8::1", 7601), ("example.org", 1)]
GOOD = {"epoch": 3, "seq": 1800000000000, "peers": ["192.0.2.1:7600", "[2001:db8::1]:7601", "example.org:1"]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "identity-0.json"


def test_a_peer_that_was_never_here_remembers_nothing(path: Path) -> None:
    with capture_logs() as logs:
        remembered = Remembered.load(path)
    assert (remembered.epoch, list(remembered.peers), logs) == (0, [], [])
    assert not path.exists()


def test_what_was_saved_is_remembered(path: Path) -> None:
    remembered = Remembered.load(path)
    remembered.epoch, remembered.seq, remembered.peers = 3, 1_800_000_000_000, PEERS
    remembered.save()
    assert json.loads(path.read_text()) == GOOD
    again = Remembered.load(path)
    assert (again.epoch, again.seq, list(again.peers)) == (3, 1_800_000_000_000, PEERS)
    again.epoch, again.peers = 4, ()
    again.save()
    assert (Remembered.load(path).epoch, list(Remembered.load(path).peers)) == (4, [])


def test_the_best_of_too_many_peers_are_kept(path: Path) -> None:
    peers = [(f"192.0.2.{number}", 7600) for number in range(MAX_PEERS + 20)]
    Remembered(path, peers=peers).save()
    assert len(json.loads(path.read_text())["peers"]) == MAX_PEERS
    assert list(Remembered.load(path).peers) == peers[:MAX_PEERS]


def test_only_the_owner_can_read_it(path: Path) -> None:
    mask = os.umask(0)
    try:
        Remembered(path).save()
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def changed(**changes: object) -> bytes:
    return json.dumps(GOOD | changes).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"[" * 60_000,
        changed(more="x" * 2**16),
        json.dumps({"epoch": 3}).encode(),
        json.dumps({"peers": []}).encode(),
        changed(epoch=-1),
        changed(epoch=True),
        changed(epoch=1.0),
        changed(epoch="3"),
        changed(epoch=2**53 + 1),
        changed(peers={"192.0.2.1:7600": 1}),
        changed(peers=[["192.0.2.1", 7600]]),
        changed(peers=["192.0.2.1"]),
        changed(peers=["192.0.2.1:0"]),
        changed(peers=["192.0.2.1:70000"]),
        changed(peers=["\x1b[2J:7600"]),
    ],
    ids=range(20),
)
def test_a_broken_file_is_put_aside_with_a_warning(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with capture_logs() as logs:
        remembered = Remembered.load(path)
    assert (remembered.epoch, list(remembered.peers)) == (0, [])
    assert [(entry["event"], entry["log_level"]) for entry in logs] == [("state_broken", "warning")]
    aside = path.with_name("identity-0.json.broken")
    assert (path.exists(), aside.read_bytes()) == (False, content)
    remembered.save()
    assert Remembered.load(path).epoch == 0


@given(st.binary(max_size=200))
def test_no_file_keeps_a_peer_from_starting(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("state") / "identity-0.json"
    path.write_bytes(content)
    with capture_logs():
        assert Remembered.load(path).epoch >= 0


def test_a_disk_that_fails_half_way_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Remembered(path, epoch=3).save()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with capture_logs() as logs:
        Remembered(path, epoch=4).save()
    assert [(entry["event"], entry["reason"]) for entry in logs] == [
        ("state_not_saved", "No space left on device")
    ]
    assert Remembered.load(path).epoch == 3


def test_what_cannot_be_read_at_all_is_left_alone(path: Path) -> None:
    path.mkdir()
    with capture_logs() as logs:
        assert Remembered.load(path).epoch == 0
    assert [entry["event"] for entry in logs] == ["state_unreadable"]
    assert path.is_dir()
