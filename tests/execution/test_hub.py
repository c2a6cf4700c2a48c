"""Models from a hub: only what is needed is downloaded. The hub is a fake one on loopback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from p2pllm.execution import open_checkpoint

from .fake_hub import REPO, serve_hub

Saved = Callable[[str], tuple[Path, Any]]


@pytest.fixture(scope="module")
def directory(saved_model: Saved, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in many files, one layer each or so."""
    directory = tmp_path_factory.mktemp("sharded")
    saved_model("llama")[1].save_pretrained(directory, max_shard_size="100kB")
    return directory


def in_a_process(hub: str, cache: Path, code: str, repo: str = REPO) -> str:
    """What ``code`` prints in a process of its own: the hub's address and cache are read at its start."""
    environment = os.environ | {
        "HF_ENDPOINT": hub,
        "HF_HOME": str(cache),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
    }
    imports = "from p2pllm.errors import ModelError\nfrom p2pllm.execution import open_checkpoint"
    program = f"{imports}\nMODEL = {repo!r}\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


ERROR = "try:\n    open_checkpoint(MODEL)\nexcept ModelError as error:\n    print(error)"
LOAD = """
import torch
from p2pllm.execution.loader import Loader
heard = []
loader = Loader(open_checkpoint(MODEL), dtype="float32", device="cpu")
loader.load(1, 2, lambda *call: heard.append(call))
stage = loader.stage
assert heard == sorted(heard) and heard[-1][0] == heard[-1][1] > stage.weight_bytes, heard
print(sum(float(state.double().sum()) for state in stage._model.kept().values()))
"""


def test_fingerprint_without_weights(directory: Path, tmp_path: Path) -> None:
    with serve_hub(directory) as hub:
        found = in_a_process(hub.url, tmp_path, "print(open_checkpoint(MODEL).fingerprint)")
    assert found == open_checkpoint(str(directory)).fingerprint
    assert not [name for name in hub.downloads if name.endswith(".safetensors")]
    weights = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    assert sum(size for _, size in hub.ranges) < weights / 5


def test_a_stage_downloads_only_the_files_of_its_layers(directory: Path, tmp_path: Path) -> None:
    weight_map = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {file for name, file in weight_map.items() if name.startswith("model.layers.1.")}
    with serve_hub(directory) as hub:
        loaded = float(in_a_process(hub.url, tmp_path, LOAD))
    assert {name for name in hub.downloads if name.endswith(".safetensors")} == needed
    assert needed < set(weight_map.values())
    checkpoint = open_checkpoint(str(directory))
    names = [name for name in checkpoint.tensors if name.startswith("model.layers.1.")]
    assert loaded == pytest.approx(sum(checkpoint.read(name).astype("f8").sum() for name in names))


def test_without_a_network_the_cached_copy_does(directory: Path, tmp_path: Path) -> None:
    with serve_hub(directory) as hub:
        in_a_process(hub.url, tmp_path, "import huggingface_hub; huggingface_hub.snapshot_download(MODEL)")
    found = in_a_process(hub.url, tmp_path, "print(open_checkpoint(MODEL).fingerprint)")
    assert found == open_checkpoint(str(directory)).fingerprint


def test_no_such_model(directory: Path, tmp_path: Path) -> None:
    with serve_hub(directory) as hub:
        assert "no model some/thing on the hub" in in_a_process(hub.url, tmp_path, ERROR, repo="some/thing")
    message = in_a_process(hub.url, tmp_path, ERROR)
    assert "cannot reach the hub" in message
    assert "\n" not in message


ASK_FOR_FILES = """
import time
time.sleep = lambda _: None  # the hub's library waits longer before each try
from p2pllm.execution.hub import HubFiles
files = HubFiles(MODEL, "c0ffee" * 6 + "0000")
asked = [("model.safetensors", 0, 8)]
for call in (lambda: files.text("config.json"), lambda: files.path("x"), files.directory, lambda:
files.ranges(asked)):
    try:
        print(call())
    except ModelError as error:
        print(error)
"""


def test_a_hub_that_is_gone_is_not_mistaken_for_a_missing_file(directory: Path, tmp_path: Path) -> None:
    with serve_hub(directory) as hub:
        pass  # its port is free again
    lines = in_a_process(hub.url, tmp_path, ASK_FOR_FILES).splitlines()
    assert len(lines) == 4
    assert all(line.startswith("cannot get someone/tiny from the hub") for line in lines)


def test_a_repository_without_weights(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    shutil.copy(directory / "config.json", tmp_path / "files")
    with serve_hub(tmp_path / "files") as hub:
        assert "someone/tiny" in in_a_process(hub.url, tmp_path, ERROR)
