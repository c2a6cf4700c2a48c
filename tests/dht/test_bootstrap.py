"""The bootstrap node as its operator runs it: a process; nodes meet through it; it stops when told."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgpack
import psutil
import pytest
from support.bodies import METRICS, PEER
from support.dht import KEY, Network

from p2pllm.dht import DhtNode
from p2pllm.identity import Identity
from p2pllm.records import directory_key, seal

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
            assert said.startswith("listening on ")
            yield process, int(port)
        finally:
            process.kill()


async def names_everybody(node: DhtNode, port: int, count: int) -> None:
    """Wait until the process at ``port`` has told a node of so many, itself among them."""
    async with asyncio.timeout(10):
        while len(node.contacts()) < count:
            assert await node.bootstrap([("127.0.0.1", port)]) == 1
            await asyncio.sleep(0.02)


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
    with running("--data-dir", str(tmp_path / "first")) as (_, first):
        flags = ("--data-dir", str(tmp_path / "second"), "--bootstrap", f"127.0.0.1:{first}")
        with running(*flags) as (_, second):
            one, other = await network.node(), await network.node()
            await one.bootstrap([("127.0.0.1", first)])
            await one.put(KEY, network.record(one))
            await other.bootstrap([("127.0.0.1", second)])
            assert await network.read_by(other) == network.ids(one)


async def test_it_comes_back_without_a_friend_and_finds_everybody(network: Network, tmp_path: Path) -> None:
    """Whom it met it remembers on disk: after a restart on another port nobody need tell it anything."""
    one, other = await network.node(), await network.node()
    with running("--data-dir", str(tmp_path)) as (process, port):
        for node in (one, other):
            assert await node.bootstrap([("127.0.0.1", port)]) == 1
        witness = await network.node()
        await names_everybody(witness, port, 3)
        process.terminate()
        await asyncio.to_thread(process.communicate, timeout=10)
    remembered = json.loads((tmp_path / "bootstrap.json").read_text())["peers"]
    assert set(remembered) >= {f"127.0.0.1:{node.port}" for node in (one, other)}
    with running("--data-dir", str(tmp_path)) as (_, port):
        network.clock.now += 8.1
        newcomer = await network.node()
        await names_everybody(newcomer, port, 4)
        await one.put(KEY, network.record(one))
        assert await network.read_by(newcomer) == network.ids(one)


def test_a_broken_memory_is_put_aside(tmp_path: Path) -> None:
    (tmp_path / "bootstrap.json").write_text('{"epoch": 0, "peers": ["nowhere"]}')
    with running("--data-dir", str(tmp_path)) as (process, _):
        process.terminate()
        _, err = process.communicate(timeout=10)
    assert process.returncode == 0
    assert '"state_broken"' in err
    assert (tmp_path / "bootstrap.json.broken").exists()


def test_a_second_one_on_the_same_directory_is_told_who_has_it(tmp_path: Path) -> None:
    flags = ("--data-dir", str(tmp_path))
    with running(*flags) as (process, _):
        command = [sys.executable, str(SCRIPT), "--port", "0", *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode != 0
    assert str(process.pid) in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_it_listens_on_both_families_where_there_are_two(tmp_path: Path) -> None:
    with running("--data-dir", str(tmp_path), "--host", "127.0.0.1,::1") as (_, port):
        for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            with socket.socket(family, socket.SOCK_DGRAM) as asker:
                asker.settimeout(5)
                asker.sendto(b"\0" + bytes(20) + msgpack.packb(["ping", bytes(8), bytes(20)]), (host, port))
                assert asker.recv(1500)[:21] == b"\1" + bytes(20)


async def test_it_is_small_with_swarms_of_records_in_it(network: Network, tmp_path: Path) -> None:
    """500 peers' records of several swarms, from one host as here all are, are what it takes of that host."""
    with running("--data-dir", str(tmp_path)) as (process, port):
        node = await network.node()
        await node.bootstrap([("127.0.0.1", port)])
        stored = 0
        for number in range(300):
            swarm = bytes([number % 5]) * 20
            owner = Identity.generate()
            for body in (PEER, METRICS):
                key = directory_key(swarm, owner.node_id, 0)
                stored += await node.put(key, seal(owner, body, swarm=swarm, seq=1, ttl=600.0)) == 2
        assert stored == 512
        assert psutil.Process(process.pid).memory_info().rss < 60 * 2**20


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--port", "70000"], "70000 is not a port: take a number from 0 to 65535"),
        (["--host", "nobody.invalid"], "choose another --host or --port"),
        (["--bootstrap", "nowhere"], "'nowhere' is not an address"),
        (["--data-dir", str(SCRIPT)], "choose another --data-dir"),
        (["--host", ","], "is not a host"),
        (["--host", "127.0.0.1,127.0.0.2"], "take one IPv4 and one IPv6 address"),
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
