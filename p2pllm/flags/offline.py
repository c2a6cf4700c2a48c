"""Flags of the commands that need no peer: plan and bench."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from p2pllm.config import parse_seconds
from p2pllm.errors import UsageError
from p2pllm.flags.common import add_model_flag, command, positive, typed

__all__ = ["add_bench", "add_plan"]

DHT_SCENARIOS = ("healthy", "idle", "killed25", "loss1", "loss5", "hostile10")


def add_plan(commands: Any) -> None:
    parser = command(
        commands,
        "plan",
        "plan a swarm that a file describes",
        "Work out which peers of CLUSTER.json would hold which layers, and the chain of a request. A small "
        'file: {"model": {"layers": 32}, "network": {"same_region_s": 0.001}, "peers": '
        '[{"id": "a", "region": "home", "capacity": 20, "tau_s": 0.02}, '
        '{"id": "b", "region": "home", "capacity": 20, "tau_s": 0.02}]}. README.md has every key.',
    )
    parser.add_argument("cluster", type=Path, metavar="CLUSTER.json", help="model, peers and network")
    parser.add_argument("--json", action="store_true", help="the plan as JSON")
    parser.add_argument(
        "--certify",
        action="store_true",
        help="say by how much an exact solver would do better: up to 32 peers, above 10 with the extra exact",
    )


def add_bench(commands: Any) -> None:
    summary = "measure this program on this machine"
    parser = commands.add_parser("bench", help=summary, description="Measure one part of p2pllm.")
    parts = parser.add_subparsers(dest="what", metavar="WHAT", title="what to measure", required=True)
    _add_bench_scheduling(parts)
    _add_bench_dht(parts)
    _add_bench_decode(parts)
    _add_bench_throughput(parts)
    _add_bench_recovery(parts)


def _add_bench_scheduling(parts: Any) -> None:
    parser = command(
        parts,
        "scheduling",
        "how long both phases take",
        "Measure how long both phases take for swarms of 4 to 4096 peers; takes some 10 minutes.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, last on stdout")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="draw time against peers, also as .pdf or .svg; needs the extra plots",
    )
    parser.add_argument(
        "--max-peers", type=typed(positive), default=4096, metavar="N", help="leave out larger swarms"
    )
    parser.add_argument(
        "--quick", action="store_true", help="few fleets of few types: rough figures in a minute"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random fleets")


def _add_bench_dht(parts: Any) -> None:
    parser = command(
        parts,
        "dht",
        "how fast peers hear of each other, and what that costs",
        "Run a swarm of peers without a model on loopback, and measure how old what they know of each other "
        "is, how long news take, and what all that costs each of them. Scenarios: healthy (it serves), idle, "
        "killed25 (a quarter killed at once), loss1 and loss5 (so many per cent of the datagrams lost), "
        "hostile10 (one node in ten lies).",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, last on stdout")
    parser.add_argument("--peers", type=typed(positive), default=64, metavar="N", help="of each swarm")
    parser.add_argument(
        "--scenarios",
        type=typed(_scenarios),
        default=DHT_SCENARIOS,
        metavar="S[,S]",
        help="one after the other; default: all",
    )
    parser.add_argument(
        "--seconds", type=typed(parse_seconds), default=20.0, metavar="S", help="how long to watch each"
    )
    parser.add_argument(
        "--processes", type=typed(positive), default=2, metavar="P", help="that share the peers"
    )
    parser.add_argument("--insecure-links", action="store_true", help="links without encryption")
    parser.add_argument("--seed", type=int, default=0, help="of who the peers are, and of what befalls them")


def _add_bench_decode(parts: Any) -> None:
    parser = command(
        parts,
        "decode",
        "how fast one answer comes",
        "Measure the decode speed of one answer with weights in float32, bfloat16, int8 and int4: "
        "transformers' generate, this program's engine with the whole model, and three peers on loopback of "
        "one thread each; by turns, so that what else this machine does favours none. Takes some minutes.",
    )
    _add_engine_flags(parser)


def _add_bench_throughput(parts: Any) -> None:
    parser = command(
        parts,
        "throughput",
        "how much many answers at once get",
        "Measure 1, 4, 8 and 16 answers at once beside transformers' continuous batching, the prefill of 512 "
        "tokens beside its forward, and what a prompt of 2000 tokens costs somebody else's answer; by turns, "
        "so that what else this machine does favours none. Takes some minutes.",
    )
    _add_engine_flags(parser)
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and activations"
    )


def _add_bench_recovery(parts: Any) -> None:
    parser = command(
        parts,
        "recovery",
        "what a client sees of the loss of a peer",
        "Start six peers on loopback that hold every layer twice. Run by run, kill one in the middle of an "
        "answer (one time in three: freeze it): the first of its chain, one in the middle and the last in "
        "turn. Measure the pause, how much is computed again and how long the next request waits, and "
        "compare the tokens with those of the same request without a loss. Takes some 10 minutes.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, last on stdout")
    add_model_flag(parser)
    parser.add_argument("--runs", type=typed(positive), default=30, metavar="N", help="losses, one a run")
    parser.add_argument(
        "--tokens", type=typed(_enough), default=48, metavar="N", help="of each answer, 16 at least"
    )
    parser.add_argument(
        "--quick", action="store_true", help="9 runs at most, one of each kind: rough figures in 3 minutes"
    )
    parser.add_argument("--seed", type=int, default=0, help="of when who is lost")


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object, last on stdout")
    add_model_flag(parser)
    parser.add_argument(
        "--tokens", type=typed(_several), default=64, metavar="N", help="of each answer, 2 at least"
    )
    parser.add_argument("--rounds", type=typed(positive), default=3, metavar="R", help="medians are of these")
    parser.add_argument("--threads", type=typed(positive), metavar="N", help="torch threads; default: cores")


def _several(text: str) -> int:
    if positive(text) < 2:
        raise UsageError(f"{text!r} is too few: what lies between two tokens is measured")
    return int(text)


def _enough(text: str) -> int:
    if positive(text) < 16:
        raise UsageError(f"{text!r} is too few for a loss in the middle of them")
    return int(text)


def _scenarios(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in DHT_SCENARIOS:
            raise UsageError(f"{name!r} is no scenario: choose from {', '.join(DHT_SCENARIOS)}")
    return names
