"""The bootstrap node as its operator runs it: a process; nodes meet through it; it stops when told."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.dht import KEY, Network

BOOTSTRAP = Path(__file__).parents[2] / "bootstrap"
SCRIPT = BOOTSTRAP / "bootstrap.py"


@contextmanager
def running(*flags: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The process and its port, once it says that it listens."""
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "--host", "127.0.0.1", "--port", "0", "--log-json", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            said, _, port = process.stdout.readline().strip().rpartition(":")
            assert said == "listening on 127.0.0.1"
            yield process, int(port)
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_two_nodes_meet_through_it_and_it_ends_when_told(
    network: Network, tmp_path: Path, number: signal.Signals
) -> None:
    with running("--data-dir", str(tmp_path)) as (process, port):
        one, other = await network.node(), await network.node()
        for node in (one, other):
            assert await node.bootstrap([("127.0.0.1", port)]) == 1
        await one.put(KEY, network.record(one))
        assert await network.read_by(other) == network.ids(one)
        process.send_signal(number)
        out, err = process.communicate(timeout=10)
    assert process.returncode == 0
    assert out == "", "one line on stdout, no more"
    assert [json.loads(line)["event"] for line in err.splitlines()] == [
        "bootstrap_ready",
        "bootstrap_stopped",
    ]


async def test_bootstrap_nodes_that_name_each_other_form_one_network(
    network: Network, tmp_path: Path
) -> None:
    with running("--data-dir", str(tmp_path)) as (_, first):
        flags = ("--data-dir", str(tmp_path), "--bootstrap", f"127.0.0.1:{first}")
        with running(*flags) as (_, second):
            one, other = await network.node(), await network.node()
            await one.bootstrap([("127.0.0.1", first)])
            await one.put(KEY, network.record(one))
            await other.bootstrap([("127.0.0.1", second)])
            assert await network.read_by(other) == network.ids(one)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--port", "70000"], "70000 is not a port: take a number from 0 to 65535"),
        (["--host", "nobody.invalid"], "choose another --host or --port"),
        (["--bootstrap", "nowhere"], "'nowhere' is not an address"),
        (["--data-dir", str(SCRIPT)], "choose another --data-dir"),
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_code_2(tmp_path: Path, flags: list[str], line: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--data-dir", str(tmp_path), *flags],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 2
    assert line in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_it_loads_nothing_that_only_peers_need() -> None:
    code = f"import runpy, sys; runpy.run_path({str(SCRIPT)!r}); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    loaded = set(done.stdout.split())
    assert {"p2pllm.dht", "kademlia", "cryptography"} <= loaded
    assert not loaded & {"torch", "transformers", "numpy", "aiohttp", "pydantic"}


def test_its_requirements_are_those_of_the_package() -> None:
    project = tomllib.loads((BOOTSTRAP.parent / "pyproject.toml").read_text())["project"]
    lines = (BOOTSTRAP / "requirements.txt").read_text().replace('"', "'").splitlines()
    named = {line for line in lines if line and not line.startswith("#")}
    assert named
    assert named <= set(project["dependencies"])
