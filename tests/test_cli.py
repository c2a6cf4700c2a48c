"""The command line: help, and every wrong turn ends in one clear line and the right exit code."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.processes import DEADLINE_S, REPOSITORY, Process, Swarm, api_of, swarm

LOOPBACK = "127.0.0.1"


def run(*arguments: str, deadline_s: float = DEADLINE_S) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "p2pllm", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
        cwd=REPOSITORY,
        env=os.environ | {"COLUMNS": "200", "HF_HUB_OFFLINE": "1"},
    )


def assert_one_line(result: subprocess.CompletedProcess[str], *, code: int, says: Sequence[str]) -> None:
    """One line of error on stderr, after whatever was logged; no traceback."""
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert "error: " in last
    for words in says:
        assert words in last
    assert result.stderr.count("error: ") == 1


def peer_flags(folder: Path) -> list[str]:
    flags = ["--headless", "--host", LOOPBACK, "--port", "0", "--api-port", "0", "--threads", "1"]
    return [*flags, "--dtype", "float32", "--data-dir", str(folder)]


@contextmanager
def taken(kind: socket.SocketKind) -> Iterator[int]:
    """A port that somebody else listens on."""
    with socket.socket(socket.AF_INET, kind) as other:
        other.bind((LOOPBACK, 0))
        if kind == socket.SOCK_STREAM:
            other.listen()
        yield other.getsockname()[1]


@pytest.mark.parametrize("command", [[], ["up"], ["demo"], ["chat"], ["status"], ["plan"], ["bench"]])
def test_help_names_every_flag_with_an_explanation(command: list[str]) -> None:
    result = run(*command, "--help")
    assert result.returncode == 0
    assert "usage: p2pllm" in result.stdout
    lines = result.stdout.splitlines()
    for number, line in enumerate(lines):
        if line.startswith("  -"):
            explained = len(line.split("  ")) > 2 or lines[number + 1].startswith(" " * 8)
            assert explained, f"{line!r} has no explanation"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--bootstrap", "nowhere"], ["'nowhere'", "host:port"]),
        (["--bootstrap", "a:99999"], ["'a:99999'", "host:port"]),
        (["--layers", "9:3"], ["'9:3'", "start:end"]),
        (["--memory", "lots"], ["'lots'", "8GiB"]),
        (["--port", "70000"], ["'70000'", "65535"]),
        (["--threads", "0"], ["'0'"]),
        (["--dtype", "int3"], ["int3", "float32"]),
        (["--colour"], ["--colour"]),
        (["--api-host", "0.0.0.0"], ["--api-open"]),
        (["demo", "--json"], ["PROMPT"]),
        (["--headless", "--host", "203.0.113.7", "--layers", "0:1"], ["203.0.113.7:7600", "--port"]),
        (["--headless", "--host", "no.such.host.invalid", "--layers", "0:1"], ["no.such.host.invalid"]),
    ],
)
def test_wrong_usage(arguments: list[str], says: list[str]) -> None:
    assert_one_line(run(*arguments), code=2, says=says)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "/no/such/model"], ["/no/such/model", "--model"]),
        (["--model", str(Path(__file__))], ["test_cli.py", "GGUF"]),
        (["--memory", "100MiB", "--layers", "0:30"], ["0:30", "100 MiB", "--layers"]),
        (["--layers", "20:40"], ["20:40", "0:30"]),
    ],
)
def test_a_model_that_cannot_be_served(arguments: list[str], says: list[str], tmp_path: Path) -> None:
    assert_one_line(run(*peer_flags(tmp_path), *arguments), code=1, says=says)


@pytest.mark.parametrize(
    ("kind", "flag"),
    [(socket.SOCK_STREAM, "--port"), (socket.SOCK_DGRAM, "--port"), (socket.SOCK_STREAM, "--api-port")],
)
def test_a_port_in_use(kind: socket.SocketKind, flag: str, tmp_path: Path) -> None:
    with taken(kind) as port:
        result = run(*peer_flags(tmp_path), flag, str(port))
    assert_one_line(result, code=2, says=[str(port), flag])


@pytest.mark.parametrize("command", ["status", "chat"])
def test_no_peer_to_talk_to(command: str) -> None:
    with taken(socket.SOCK_DGRAM) as port:
        result = run(command, "--api", f"http://{LOOPBACK}:{port}")
    assert_one_line(result, code=1, says=[str(port), "--api"])


def test_status_starts_in_well_under_a_second_without_torch() -> None:
    code = "import sys, p2pllm.cli; sys.argv = ['p2pllm', 'status', '--api', 'http://127.0.0.1:9'];"
    code += "p2pllm.cli.main(); print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "False"


def lone_peer(folder: Path, bootstrap: str) -> list[str]:
    """A peer with one layer: it loads quickly."""
    return ["-m", "p2pllm", *peer_flags(folder), "--log-json", "--layers", "29:30", "--bootstrap", bootstrap]


def test_a_peer_keeps_trying_when_no_bootstrap_answers(tmp_path: Path) -> None:
    with taken(socket.SOCK_DGRAM) as port:
        peer = Process(
            tmp_path,
            "peer",
            lone_peer(tmp_path, f"{LOOPBACK}:{port},{LOOPBACK}:{port + 1}"),
        )
        try:
            said = peer.event("bootstrap_unreachable")
            assert f"{LOOPBACK}:{port}" in said["addresses"]
            peer.event("ready")
        finally:
            assert peer.stop() == 0


def test_a_bootstrap_node_that_comes_late_is_found(tmp_path: Path) -> None:
    with taken(socket.SOCK_DGRAM) as dead, taken(socket.SOCK_DGRAM) as late:
        peer = Process(
            tmp_path,
            "peer",
            lone_peer(tmp_path, f"{LOOPBACK}:{dead},{LOOPBACK}:{late}"),
        )
        peer.event("bootstrap_unreachable")
    node = Process(
        tmp_path,
        "node",
        [
            "bootstrap/bootstrap.py",
            "--host",
            LOOPBACK,
            "--port",
            str(late),
            "--data-dir",
            str(tmp_path / "b"),
        ],
    )
    try:
        peer.event("bootstrap_joined")
    finally:
        assert peer.stop() == 0
        assert node.stop() == 0


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Swarm, Process]]:
    """A swarm with one peer that holds one layer: enough to join, not to answer."""
    with swarm(tmp_path_factory.mktemp("small")) as made:
        (peer,) = made.start("0:1")
        yield made, peer


def test_a_peer_with_a_different_model_is_told(
    small: tuple[Swarm, Process], other_model: Path, tmp_path: Path
) -> None:
    made, _ = small
    flags = [*peer_flags(tmp_path), "--bootstrap", made.bootstrap, "--model", str(other_model)]
    result = run(*flags)
    assert_one_line(result, code=1, says=["SmolLM2-135M-Instruct", other_model.name, "--new-swarm"])
    other = Process(tmp_path, "other", ["-m", "p2pllm", *flags, "--new-swarm", "--log-json"])
    try:
        other.event("ready")
    finally:
        assert other.stop() == 0


def test_status_shows_the_swarm(small: tuple[Swarm, Process]) -> None:
    _, peer = small
    result = run("status", "--api", api_of(peer))
    assert result.returncode == 0
    for words in ("SmolLM2-135M-Instruct", "30 layers", "0:1", "this one", "no peer serves layers 1:30"):
        assert words in result.stdout


def test_status_as_json_is_the_whole_view(small: tuple[Swarm, Process]) -> None:
    _, peer = small
    result = run("status", "--json", "--api", api_of(peer))
    assert result.returncode == 0
    (line,) = result.stdout.splitlines()
    swarm = json.loads(line)
    assert swarm["missing"] == [[1, 30]]
    assert swarm["route"] is None
    assert [entry["peer"] for entry in swarm["peers"]] == [swarm["self"]]


def test_chat_talks_to_a_running_peer(small: tuple[Swarm, Process]) -> None:
    _, peer = small
    result = run("chat", "--api", api_of(peer))  # stdin is empty: it shows the swarm and leaves
    assert result.returncode == 0
    assert "no peer serves layers 1:30" in result.stdout


def test_a_swarm_without_a_bootstrap_prints_how_to_join(tmp_path: Path) -> None:
    first = Process(
        tmp_path, "first", ["-m", "p2pllm", *peer_flags(tmp_path), "--log-json", "--layers", "0:1"]
    )
    second = None
    try:
        command = first.event("swarm_started")["join_with"]
        assert command.startswith("python -m p2pllm --bootstrap 127.0.0.1:")
        arguments = command.split()[1:]
        second = Process(
            tmp_path, "second", [*arguments, *peer_flags(tmp_path), "--log-json", "--layers", "1:2"]
        )
        second.event("bootstrap_joined")
        first.event("peer_arrived")
        second.event("peer_arrived")
    finally:
        assert first.stop() == 0
        assert second is not None
        assert second.stop() == 0


@pytest.mark.slow
def test_the_next_free_port_is_taken_and_said(tmp_path: Path) -> None:
    flags = [flag for flag in peer_flags(tmp_path) if flag not in ("--port", "--api-port", "0")]
    peers = [
        Process(tmp_path, f"peer-{number}", ["-m", "p2pllm", *flags, "--log-json", "--layers", "29:30"])
        for number in range(2)
    ]
    try:
        urls = [api_of(peer) for peer in peers]
        assert len(set(urls)) == 2
        said = [event for peer in peers for event in peer.events("port_taken")]
        assert all(event["next"] == event["port"] + 1 for event in said)
        assert said
    finally:
        for peer in peers:
            assert peer.stop() == 0
