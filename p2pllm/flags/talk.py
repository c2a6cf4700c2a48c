"""Flags of the commands that talk to a peer that runs already, or to a whole swarm of them: the demo."""

from __future__ import annotations

import argparse
import os
from typing import Any

from p2pllm.flags.common import DEFAULT_API, add_model_flags, command, positive, temperature, typed

__all__ = ["add_chat", "add_demo", "add_operator_commands", "add_status"]

KEY_VARIABLE = "P2PLLM_API_KEY"


def add_demo(commands: Any) -> None:
    parser = command(
        commands,
        "demo",
        "a whole swarm of processes on this machine",
        "Start a bootstrap node and several peers on loopback, each its own process, and chat with them; "
        "or answer PROMPT and exit.",
    )
    parser.add_argument("prompt", nargs="?", help="answer this and exit")
    parser.add_argument("--peers", type=typed(positive), default=3, help="peers that share the layers")
    parser.add_argument("--regions", type=typed(positive), default=2, help="regions they are spread over")
    parser.add_argument("--max-tokens", type=typed(positive), default=256, help="longest answer to PROMPT")
    parser.add_argument(
        "--temperature", type=typed(temperature), default=0.0, help="default: 0, which is greedy"
    )
    parser.add_argument("--seed", type=int, default=0, help="of sampling, when the temperature is above 0")
    parser.add_argument("--json", action="store_true", help="the answer as JSON, last line of stdout")
    add_model_flags(parser)


def add_chat(commands: Any) -> None:
    parser = command(
        commands,
        "chat",
        "chat with a running peer",
        "Open the chat against a peer that is already running.",
    )
    _add_api_flags(parser)


def add_status(commands: Any) -> None:
    parser = command(
        commands,
        "status",
        "show the swarm",
        "Show who serves which layers, as a running peer sees it.",
    )
    _add_api_flags(parser)
    parser.add_argument("--json", action="store_true", help="everything the peer knows, as JSON")
    parser.add_argument(
        "--cluster",
        action="store_true",
        help="the swarm as a CLUSTER.json, to see with the command plan what a new placement would be",
    )
    parser.add_argument("--watch", action="store_true", help="show it again each second, until Ctrl-C")


def add_operator_commands(commands: Any) -> None:
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
        parser = command(commands, name, summary, detail)
        parser.add_argument("--api", default=DEFAULT_API, metavar="URL", help="of the peer's API")
        if name == "replan":
            parser.add_argument(
                "--force",
                action="store_true",
                help="also make moves that interrupt the service, as when two full peers swap layers",
            )


def _add_api_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--api", default=DEFAULT_API, metavar="URL", help="of the peer's API")
    parser.add_argument(
        "--api-key",
        default=os.environ.get(KEY_VARIABLE, ""),
        metavar="KEY",
        help=f"where the peer takes one; default: what {KEY_VARIABLE} says in the environment",
    )
