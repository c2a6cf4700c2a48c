"""The flags of every command, with their help. Parsing only: nothing here does anything."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from p2pllm import __version__
from p2pllm.config import (
    API_PORT,
    EVERYWHERE,
    LINK_PORT,
    default_data_dir,
    parse_addresses,
    parse_hosts,
    parse_layers,
    parse_listen,
    parse_region,
    parse_seconds,
    parse_size,
)
from p2pllm.errors import UsageError

__all__ = ["COMMANDS", "make_parser"]

COMMANDS = ("up", "demo", "chat", "status", "replan", "leave", "pause", "resume", "plan", "bench")
DHT_SCENARIOS = ("healthy", "idle", "killed25", "loss1", "loss5", "hostile10")
MAX_THREADS = 1024
DEFAULT_API = f"http://127.0.0.1:{API_PORT}"

EPILOG = f"""\
examples:
  python -m p2pllm                                          start a new swarm with the embedded model
  python -m p2pllm --bootstrap 192.0.2.1:{LINK_PORT}              join one: serve what it needs most
  python -m p2pllm demo "Why is the sky blue?"              a whole swarm on this machine, one answer
  python -m p2pllm status                                   who serves what
  python -m p2pllm plan CLUSTER.json                        who would serve what, from a description

flags of a command: python -m p2pllm COMMAND --help
exit codes: 0 done, 1 failed (one line on stderr says why), 2 wrong usage
"""


class _Help(argparse.HelpFormatter):
    """Names the default of a flag where it has one and the help does not."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        plain = action.default in (None, False, argparse.SUPPRESS, ())
        if plain or action.help is None or "default" in action.help:
            return action.help
        return f"{action.help} (default: %(default)s)"


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; ``command`` of what it parses names one of COMMANDS."""
    parser = argparse.ArgumentParser(
        prog="p2pllm",
        description="A swarm of unlike machines that serves one language model, with no coordinator.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"p2pllm {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    _add_up(commands)
    _add_demo(commands)
    _add_chat(commands)
    _add_status(commands)
    _add_operator_commands(commands)
    _add_plan(commands)
    _add_bench(commands)
    return parser


def _command(commands: Any, name: str, summary: str, detail: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=detail, formatter_class=_Help
    )
    parser.add_argument("--debug", action="store_true", help="log more, and show tracebacks")
    return parser


def _typed(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Our parsers' errors in the form that argparse reports as wrong usage."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise UsageError(f"{text!r} is not a port: write a number up to 65535, 0 for any free one")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 2**31 - 1:
        raise UsageError(f"{text!r} is not a number from 1 on")
    return int(text)


def _threads(text: str) -> int:
    if _positive(text) > MAX_THREADS:
        raise UsageError(f"{text!r} threads are more than {MAX_THREADS}")
    return int(text)


def _temperature(text: str) -> float:
    if not text.replace(".", "", 1).isdecimal() or float(text) > 2:
        raise UsageError(f"{text!r} is not a temperature: write a number from 0 (greedy) to 2")
    return float(text)


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="embedded",
        help="a Hugging Face directory, a GGUF file, a hub id (owner/name), "
        "or 'embedded' (SmolLM2-135M-Instruct)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of weights and activations; default: bfloat16 where the hardware has it, else float32",
    )
    parser.add_argument(
        "--threads", type=_typed(_threads), help="torch threads; default: cores ÷ peers on this machine"
    )


def _add_up(commands: Any) -> None:
    parser = _command(
        commands,
        "up",
        "run a peer (the default command)",
        "Run a peer: join a swarm, serve layers, and open the chat when stdin is a terminal.",
    )
    _add_model_flags(parser)
    parser.add_argument(
        "--bootstrap",
        type=_typed(parse_addresses),
        default=(),
        metavar="H:P[,H:P]",
        help="peers or bootstrap nodes to join through; without it a new swarm starts",
    )
    parser.add_argument(
        "--new-swarm",
        action="store_true",
        help="serve a model that the network behind --bootstrap does not serve yet, beside the ones it does",
    )
    parser.add_argument(
        "--region",
        type=_typed(parse_region),
        default="default",
        help="name of the place; peers near each other share it",
    )
    parser.add_argument(
        "--host",
        type=_typed(parse_listen),
        default=EVERYWHERE,
        metavar="A[,A]",
        help="addresses for links (TCP) and the DHT (UDP), IPv4, IPv6 or both; default: all",
    )
    parser.add_argument(
        "--port", type=_typed(_port), help=f"port for both; default: the first free one from {LINK_PORT} on"
    )
    parser.add_argument(
        "--advertise",
        type=_typed(parse_hosts),
        default=(),
        metavar="A[,A]",
        help="host or host:port under which others reach this peer; default: found out",
    )
    parser.add_argument("--api-host", default="127.0.0.1", help="address of the HTTP API")
    parser.add_argument(
        "--api-port",
        type=_typed(_port),
        help=f"port of the API; default: the first free one from {API_PORT} on",
    )
    parser.add_argument(
        "--api-open", action="store_true", help="allow an --api-host that other machines can reach"
    )
    parser.add_argument(
        "--swarm-key-file",
        type=Path,
        metavar="FILE",
        help="make the swarm private: only peers with the same key find it, read it, or link with it",
    )
    parser.add_argument(
        "--insecure-links",
        action="store_true",
        help="links without encryption, for tests on loopback; all peers of a swarm alike",
    )
    parser.add_argument(
        "--grace",
        type=_typed(parse_seconds),
        default=30.0,
        metavar="SECONDS",
        help="how long a peer that leaves or moves waits for its sessions to end",
    )
    parser.add_argument(
        "--memory",
        type=_typed(parse_size),
        metavar="SIZE",
        help="memory for weights and KV caches, as 8GiB; default: what is free",
    )
    parser.add_argument(
        "--layers",
        type=_typed(parse_layers),
        metavar="A:B",
        help="decoder layers to serve whatever others do, the end not included; default: what the swarm's "
        "leader gives this peer",
    )
    parser.add_argument("--device", help="cpu, mps, cuda, cuda:1, …; default: the best one")
    parser.add_argument("--headless", action="store_true", help="no chat, even on a terminal")
    parser.add_argument(
        "--until-eof", action="store_true", help="leave when stdin closes, as when a parent process ends"
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=default_data_dir(),
        metavar="DIR",
        help="where identity and logs live",
    )
    parser.add_argument("--log-json", action="store_true", help="one JSON object a line")


def _add_demo(commands: Any) -> None:
    parser = _command(
        commands,
        "demo",
        "a whole swarm of processes on this machine",
        "Start a bootstrap node and several peers on loopback, each its own process, and chat with them; "
        "or answer PROMPT and exit.",
    )
    parser.add_argument("prompt", nargs="?", help="answer this and exit")
    parser.add_argument("--peers", type=_typed(_positive), default=3, help="peers that share the layers")
    parser.add_argument("--regions", type=_typed(_positive), default=2, help="regions they are spread over")
    parser.add_argument("--max-tokens", type=_typed(_positive), default=256, help="longest answer to PROMPT")
    parser.add_argument(
        "--temperature", type=_typed(_temperature), default=0.0, help="default: 0, which is greedy"
    )
    parser.add_argument("--seed", type=int, default=0, help="of sampling, when the temperature is above 0")
    parser.add_argument("--json", action="store_true", help="the answer as JSON, last line of stdout")
    _add_model_flags(parser)


def _add_chat(commands: Any) -> None:
    parser = _command(
        commands,
        "chat",
        "chat with a running peer",
        "Open the chat against a peer that is already running.",
    )
    parser.add_argument("--api", default=DEFAULT_API, metavar="URL", help="of the peer's API")


def _add_status(commands: Any) -> None:
    parser = _command(
        commands,
        "status",
        "show the swarm",
        "Show who serves which layers, as a running peer sees it.",
    )
    parser.add_argument("--api", default=DEFAULT_API, metavar="URL", help="of the peer's API")
    parser.add_argument("--json", action="store_true", help="everything the peer knows, as JSON")
    parser.add_argument(
        "--cluster",
        action="store_true",
        help="the swarm as a CLUSTER.json, to see with the command plan what a new placement would be",
    )
    parser.add_argument("--watch", action="store_true", help="show it again each second, until Ctrl-C")


def _add_operator_commands(commands: Any) -> None:
    for name, summary, detail in (
        (
            "replan",
            "have the swarm place its layers anew",
            "Ask the swarm's leader for a new placement, through a peer on this machine.",
        ),
        (
            "leave",
            "have a peer leave without a gap",
            "Have a peer on this machine hand its layers over, finish its sessions, and end.",
        ),
        (
            "pause",
            "have a peer hand over its layers and stay",
            "Have a peer on this machine give its layers to others; it stays an entry to the swarm.",
        ),
        ("resume", "end a pause", "Have a paused peer on this machine take layers again."),
    ):
        parser = _command(commands, name, summary, detail)
        parser.add_argument("--api", default=DEFAULT_API, metavar="URL", help="of the peer's API")
        if name == "replan":
            parser.add_argument(
                "--force",
                action="store_true",
                help="also make moves that interrupt the service, as when two full peers swap layers",
            )


def _add_plan(commands: Any) -> None:
    parser = _command(
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


def _add_bench(commands: Any) -> None:
    parser = _command(
        commands,
        "bench",
        "measure this program on this machine",
        "Measure one part of p2pllm: see the --help of each.",
    )
    parts = parser.add_subparsers(dest="what", metavar="WHAT", title="what to measure", required=True)
    _add_bench_scheduling(parts)
    _add_bench_dht(parts)


def _add_bench_scheduling(parts: Any) -> None:
    parser = _command(
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
        "--max-peers", type=_typed(_positive), default=4096, metavar="N", help="leave out larger swarms"
    )
    parser.add_argument(
        "--quick", action="store_true", help="few fleets of few types: rough figures in a minute"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random fleets")


def _add_bench_dht(parts: Any) -> None:
    parser = _command(
        parts,
        "dht",
        "how fast peers hear of each other, and what that costs",
        "Run a swarm of peers without a model on loopback, and measure how old what they know of each other "
        "is, how long news take, and what all that costs each of them. Scenarios: healthy (it serves), idle, "
        "killed25 (a quarter killed at once), loss1 and loss5 (so many per cent of the datagrams lost), "
        "hostile10 (one node in ten lies).",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, last on stdout")
    parser.add_argument("--peers", type=_typed(_positive), default=64, metavar="N", help="of each swarm")
    parser.add_argument(
        "--scenarios",
        type=_typed(_scenarios),
        default=DHT_SCENARIOS,
        metavar="S[,S]",
        help="one after the other; default: all",
    )
    parser.add_argument(
        "--seconds", type=_typed(parse_seconds), default=20.0, metavar="S", help="how long to watch each"
    )
    parser.add_argument(
        "--processes", type=_typed(_positive), default=2, metavar="P", help="that share the peers"
    )
    parser.add_argument("--insecure-links", action="store_true", help="links without encryption")
    parser.add_argument("--seed", type=int, default=0, help="of who the peers are, and of what befalls them")


def _scenarios(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in DHT_SCENARIOS:
            raise UsageError(f"{name!r} is no scenario: choose from {', '.join(DHT_SCENARIOS)}")
    return names
