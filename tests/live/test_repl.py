"""The chat in a terminal, driven through a pseudo-terminal as a person would."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import REPOSITORY

ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|[()][A-Z0-9]|[=>])")


DEADLINE_S = 60.0
"""Bounds a hang."""


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "p2pllm", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=REPOSITORY,
            start_new_session=True,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "200", "LINES": "50", "PROMPT_TOOLKIT_NO_CPR": "1"},
        )
        os.close(slave)
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def expect(self, words: str) -> str:
        """Read until ``words`` appear; returns and forgets everything up to them."""
        end = time.monotonic() + DEADLINE_S
        while words not in self.text:
            assert time.monotonic() < end, f"no {words!r} in {self.text[-2000:]!r}"
            if select.select([self._master], [], [], 0.1)[0]:
                try:
                    raw = os.read(self._master, 65536)
                except OSError:  # the other side is gone
                    raise AssertionError(f"ended without {words!r}: {self.text[-2000:]!r}") from None
                self.text += ESCAPES.sub("", raw.decode(errors="replace"))
        before, _, self.text = self.text.partition(words)
        return before

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(20)
        os.close(self._master)


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Terminal]:
    """One peer that holds everything, with its chat."""
    terminal = Terminal(
        *["--host", "127.0.0.1", "--port", "0", "--api-port", "0", "--dtype", "float32"],
        *["--data-dir", str(tmp_path)],
    )
    try:
        yield terminal
    finally:
        terminal.close()


def test_a_chat(peer: Terminal, tmp_path: Path) -> None:
    peer.expect("others join with: python -m p2pllm --bootstrap 127.0.0.1:")
    assert "SmolLM2-135M-Instruct · 30 layers" in peer.expect("›")
    peer.type("/temperature 0\r")
    peer.expect("›")
    peer.type("Name the capital of France.\r")
    peer.expect("Paris")
    assert "first after" in peer.expect("tok/s")
    peer.expect("›")
    peer.type("And of Italy?\r")
    peer.expect("Rome")  # only the conversation so far makes sense of the question
    peer.expect("›")
    peer.type("/help\r")
    peer.expect("/reset")
    peer.type("/swarm\r")
    peer.expect("this one")
    peer.type("/nonsense\r")
    peer.expect("there is no /nonsense")
    peer.type("Count to ten thousand, one number a line.\r")
    peer.expect("3")
    peer.process.send_signal(signal.SIGINT)  # stops the answer, not the peer
    peer.expect("›")
    peer.type("/exit\r")
    assert peer.process.wait(20) == 0
    (log,) = tmp_path.glob("peer.log")
    assert "api_listening" in log.read_text()
    assert "Traceback" not in log.read_text()


def test_ctrl_c_at_the_prompt_leaves(peer: Terminal) -> None:
    peer.expect("›")
    peer.type("\x03")
    assert peer.process.wait(20) == 0


def test_a_peer_that_waits_for_others_says_for_which_layers(tmp_path: Path) -> None:
    terminal = Terminal(
        *[
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--api-port",
            "0",
            "--layers",
            "0:3",
            "--data-dir",
            str(tmp_path),
        ]
    )
    try:
        terminal.expect("waiting for peers that serve layers 3:30")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(20) == 0
    finally:
        terminal.close()
