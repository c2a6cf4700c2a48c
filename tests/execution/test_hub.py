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
        "TQDM_POSITION": "-1",  # which shows bars although this is no terminal
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
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
    assert "%|" not in done.stderr, "there is one bar, and it is not the library's"
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


def file_of_layer_1(directory: Path) -> str:
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    file: str = index["weight_map"]["model.layers.1.mlp.down_proj.weight"]
    return file


FETCH = """
import huggingface_hub.constants
huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE = 1000  # of ten million bytes, that is
checkpoint = open_checkpoint(MODEL)
names = [name for name in checkpoint.tensors if name.startswith("model.layers.1.")]
heard = []
def fetch():
    checkpoint.fetch(names, lambda *call: heard.append(call))
"""


def test_a_cut_connection_goes_on_where_it_was(directory: Path, tmp_path: Path) -> None:
    file = file_of_layer_1(directory)
    size = (directory / file).stat().st_size
    with serve_hub(directory) as hub:
        hub.cut.add(file)
        pieces = int(in_a_process(hub.url, tmp_path, f"{FETCH}\nfetch()\nprint(len(heard))"))
        assert (file, size - size // 2 // 1000 * 1000) in hub.ranges
        assert hub.downloads.count(file) == 1
    assert pieces > size / 1000, "progress is heard within a file"


def test_a_damaged_file_is_removed_and_got_again(directory: Path, tmp_path: Path) -> None:
    file = file_of_layer_1(directory)
    twice = f"{FETCH}\ntry:\n    fetch()\nexcept ModelError as error:\n    print(error)\nfetch()"
    with serve_hub(directory) as hub:
        hub.damaged.add(file)
        message = in_a_process(hub.url, tmp_path, twice)
        assert message.startswith(f"{file} of {REPO} came damaged (SHA-256")
        assert hub.downloads.count(file) == 2
    (copy,) = {path.resolve() for path in tmp_path.rglob(file)}
    assert copy.read_bytes() == (directory / file).read_bytes()


DOWNLOAD = """
import huggingface_hub
from huggingface_hub.utils import disable_progress_bars
disable_progress_bars()
huggingface_hub.snapshot_download(MODEL)
"""


def test_without_a_network_the_cached_copy_does(directory: Path, tmp_path: Path) -> None:
    with serve_hub(directory) as hub:
        in_a_process(hub.url, tmp_path, DOWNLOAD)
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
