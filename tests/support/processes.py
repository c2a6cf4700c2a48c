"""Real peers as real processes, on loopback, for tests to talk to, to kill, and to count."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).parent.parent.parent
DEADLINE_S = 120.0
"""Bounds a hang; a start takes a tenth of it on two cores."""


class Process:
    """A child that logs JSON lines to a file; what it prints goes to another. Its temporary files stay beside
    them.
    """

    def __init__(self, folder: Path, name: str, arguments: Sequence[str]) -> None:
        self.log = folder / f"{name}.log"
        self.out = folder / f"{name}.out"
        with self.log.open("wb") as log, self.out.open("wb") as out:
            self.popen = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                cwd=REPOSITORY,
                env=os.environ | {"TMPDIR": str(folder)},
                start_new_session=True,
            )

    def events(self, name: str) -> list[dict[str, Any]]:
        """Log events of this name so far."""
        found = []
        for line in self.log.read_text().splitlines():
            if line.startswith("{") and f'"{name}"' in line:
                event = json.loads(line)
                if event["event"] == name:
                    found.append(event)
        return found

    def event(self, name: str, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
        """Wait for the first log event of this name."""
        wait_for(
            lambda: bool(self.events(name)) or self.popen.poll() is not None,
            deadline_s,
            f"{name} of {self.log}",
        )
        events = self.events(name)
        assert events, f"{self.log.name} ended without {name}: {self.log.read_text()[-2000:]}"
        return events[0]

    def line(self, prefix: str, deadline_s: float = DEADLINE_S) -> str:
        """Wait for the first line of output that begins with ``prefix``."""

        def found() -> str | None:
            return next((line for line in self.out.read_text().splitlines() if line.startswith(prefix)), None)

        wait_for(lambda: found() is not None or self.popen.poll() is not None, deadline_s, f"{prefix!r}")
        line = found()
        assert line is not None, f"{self.log.name} ended: {self.log.read_text()[-2000:]}"
        return line

    def kill(self) -> None:
        """kill -9."""
        self.popen.kill()
        self.popen.wait(10)

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
        try:
            return self.popen.wait(15)
        except subprocess.TimeoutExpired:
            self.kill()
            raise


def wait_for(condition: Any, deadline_s: float, what: str) -> None:
    """Poll until ``condition()`` is true."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"waited {deadline_s:.0f} s for {what}"
        time.sleep(0.02)


class Swarm:
    """A bootstrap node and peers, each its own process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count(1)
        self.processes: list[Process] = []
        self.bootstrap = self._start_bootstrap()

    def _start_bootstrap(self) -> str:
        node = Process(
            self._folder,
            "bootstrap",
            [
                "bootstrap/bootstrap.py",
                "--host",
                "127.0.0.1",
                "--port",
                "0",
                "--data-dir",
                str(self._folder / "b"),
            ],
        )
        self.processes.append(node)
        return node.line("listening on ").removeprefix("listening on ")

    def start(self, *layers: str, dtype: str = "float32", more: Sequence[str] = ()) -> list[Process]:
        """Start a peer per layer range, all at once, and wait until each has loaded."""
        peers = [self.join("--layers", span, *more, dtype=dtype) for span in layers]
        for peer in peers:
            peer.event("ready")
        return peers

    def join(self, *more: str, dtype: str = "float32") -> Process:
        """Start one more peer; without ``--layers`` it takes what it is given."""
        number = next(self._numbers)
        arguments = ["-m", "p2pllm", "--headless", "--log-json", "--bootstrap", self.bootstrap]
        arguments += ["--host", "127.0.0.1", "--port", "0", "--api-port", "0", "--threads", "1"]
        arguments += ["--dtype", dtype, "--data-dir", str(self._folder / "peers"), *more]
        peer = Process(self._folder, f"peer-{number}", arguments)
        self.processes.append(peer)
        return peer

    def close(self) -> None:
        """Stop everything; fails if a process had to be killed or left children."""
        for process in self.processes:
            if process.popen.poll() is None:
                process.popen.send_signal(signal.SIGTERM)
        for process in self.processes:
            process.stop()


def api_of(peer: Process) -> str:
    """The API URL of a peer."""
    return str(peer.event("api_listening")["url"])


@contextmanager
def swarm(folder: Path) -> Iterator[Swarm]:
    """A swarm that is stopped at the end of the block."""
    made = Swarm(folder)
    try:
        yield made
    finally:
        made.close()


def descendants(pid: int) -> list[psutil.Process]:
    """All live processes below ``pid``."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def ports(processes: Sequence[psutil.Process]) -> set[tuple[str, int]]:
    """(tcp | udp, port) on which these processes listen."""
    found = set()
    for process in processes:
        for connection in process.net_connections("inet"):
            if connection.type.name == "SOCK_DGRAM" or connection.status == psutil.CONN_LISTEN:
                found.add(("udp" if connection.type.name == "SOCK_DGRAM" else "tcp", connection.laddr.port))
    return found


def interrupt(pid: int) -> None:
    """What Ctrl-C does."""
    os.kill(pid, signal.SIGINT)
