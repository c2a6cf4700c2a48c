"""Flags of ``up``, the default command: run a peer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    parse_stretch,
)
from p2pllm.flags.common import add_model_flags, command, port, typed

__all__ = ["add_up"]


def add_up(commands: Any) -> None:
    parser = command(
        commands,
        "up",
        "run a peer (the default command)",
        "Run a peer: join a swarm, serve layers, and open the chat when stdin is a terminal.",
    )
    add_model_flags(parser)
    parser.add_argument(
        "--bootstrap",
        type=typed(parse_addresses),
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
        type=typed(parse_region),
        default="default",
        help="name of the place; peers near each other share it",
    )
    parser.add_argument(
        "--host",
        type=typed(parse_listen),
        default=EVERYWHERE,
        metavar="A[,A]",
        help="addresses for links (TCP) and the DHT (UDP), IPv4, IPv6 or both; default: all",
    )
    parser.add_argument(
        "--port", type=typed(port), help=f"port for both; default: the first free one from {LINK_PORT} on"
    )
    parser.add_argument(
        "--advertise",
        type=typed(parse_hosts),
        default=(),
        metavar="A[,A]",
        help="host or host:port under which others reach this peer; default: found out",
    )
    parser.add_argument("--api-host", default="127.0.0.1", help="address of the HTTP API")
    parser.add_argument(
        "--api-port",
        type=typed(port),
        help=f"port of the API; default: the first free one from {API_PORT} on",
    )
    parser.add_argument(
        "--api-open", action="store_true", help="allow an --api-host that other machines can reach"
    )
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="answer only who has one of the keys in this TOML file; see the README",
    )
    parser.add_argument(
        "--queue-timeout",
        type=typed(parse_seconds),
        default=60.0,
        metavar="SECONDS",
        help="how long a request to the API waits for its turn, or for layers that nobody serves",
    )
    parser.add_argument(
        "--stretch",
        type=typed(parse_stretch),
        default=1.8,
        metavar="TIMES",
        help="how many times as long as alone a token may take while many are answered at once: with more, "
        "there are more tokens per second in all, and fewer for each",
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
        type=typed(parse_seconds),
        default=30.0,
        metavar="SECONDS",
        help="how long a peer that leaves or moves waits for its sessions to end",
    )
    parser.add_argument(
        "--memory",
        type=typed(parse_size),
        metavar="SIZE",
        help="memory for weights and KV caches, as 8GiB; default: what is free",
    )
    parser.add_argument(
        "--layers",
        type=typed(parse_layers),
        metavar="A:B",
        help="decoder layers to serve whatever others do, the end not included; default: what the swarm's "
        "leader gives this peer",
    )
    parser.add_argument("--device", help="cpu, mps, cuda, cuda:1, …; default: the best one")
    parser.add_argument(
        "--quant",
        choices=("none", "fp8", "int8", "int4"),
        default="none",
        help="how weights are kept, to hold more layers and decode faster: int8 and int4 on a CPU, fp8 on a "
        "GPU that has it",
    )
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
