"""``p2pllm demo`` as a user runs it, and Ctrl-C at awkward moments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.processes import DEADLINE_S, REPOSITORY, Process, descendants, interrupt, ports, wait_for
from support.reference import Reference

QUESTION = "Why is the sky blue?"


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "p2pllm", "demo", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        cwd=REPOSITORY,
    )


def test_a_prompt_is_answered_as_json(reference: Reference) -> None:
    result = demo(QUESTION, "--json", "--max-tokens", "32", "--dtype", "float32")
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout.splitlines()[-1])
    assert set(answer) == {"text", "token_ids", "chain", "ttft_s", "tokens_per_s"}
    reference.check_greedy(QUESTION, answer["token_ids"], limit=32)
    assert answer["text"] == reference.text(answer["token_ids"])
    chain = answer["chain"]
    assert [stage["start"] for stage in chain] == [0, *(stage["end"] for stage in chain[:-1])]
    assert chain[-1]["end"] == 30
    assert len({stage["peer"] for stage in chain}) == 3
    assert {stage["region"] for stage in chain} == {"eu", "us"}
    assert answer["ttft_s"] > 0
    assert answer["tokens_per_s"] > 0


@pytest.mark.slow
def test_a_prompt_is_answered_for_people() -> None:
    result = demo(QUESTION, "--peers", "1", "--max-tokens", "8", "--dtype", "float32")
    assert result.returncode == 0, result.stderr
    text, figures = result.stdout.strip().splitlines()
    assert text == "The answer to this question lies in the"
    assert figures.startswith("8 tokens · first after ")
    assert "tok/s" in figures
    assert "0:30 (eu)" in figures
    assert "SmolLM2-135M-Instruct · 30 layers" in result.stderr


@pytest.mark.parametrize(
    "moment", ["bootstrap", "peers", pytest.param("loading", marks=pytest.mark.slow), "answering"]
)
def test_ctrl_c_leaves_no_process_and_no_port(moment: str, tmp_path: Path) -> None:
    process = Process(
        tmp_path, "demo", ["-m", "p2pllm", "demo", "Count to a thousand.", "--max-tokens", "2000", "--debug"]
    )
    pid = process.popen.pid

    def reached() -> bool:
        assert process.popen.poll() is None, process.log.read_text()[-2000:]
        match moment:
            case "bootstrap":
                return len(descendants(pid)) >= 1
            case "peers":
                return len(descendants(pid)) >= 3
            case "loading":
                return '"loading"' in process.log.read_text()
            case _:
                return process.out.stat().st_size > 0

    wait_for(reached, DEADLINE_S, moment)
    family = descendants(pid)
    listening = ports(family)
    assert listening or moment != "answering"
    interrupt(pid)
    assert process.popen.wait(20) == 130
    _, alive = psutil.wait_procs(family, timeout=1)
    assert not alive
    for kind, port in listening:
        assert port not in {
            connection.laddr.port
            for connection in psutil.net_connections("udp" if kind == "udp" else "tcp")
            if kind == "udp" or connection.status == psutil.CONN_LISTEN
        }


def test_a_demo_that_is_killed_takes_its_processes_along(tmp_path: Path) -> None:
    command = ["-m", "p2pllm", "demo", "Count to a thousand.", "--peers", "2", "--debug"]
    process = Process(tmp_path, "demo", command)
    wait_for(lambda: '"loading"' in process.log.read_text(), DEADLINE_S, "the peers to load")
    family = descendants(process.popen.pid)
    assert len(family) == 3
    process.kill()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive


def test_more_peers_than_layers_is_one_clear_line() -> None:
    result = demo(QUESTION, "--peers", "31")
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1].startswith("p2pllm: error: 31 peers cannot share 30 layers")
