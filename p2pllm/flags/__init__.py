"""The flags of every command, with their help. Parsing only: nothing here does anything."""

from __future__ import annotations

import argparse

from p2pllm import __version__
from p2pllm.config import LINK_PORT
from p2pllm.flags.offline import add_bench, add_plan
from p2pllm.flags.talk import add_chat, add_demo, add_operator_commands, add_status
from p2pllm.flags.up import add_up

__all__ = ["COMMANDS", "make_parser"]

COMMANDS = ("up", "demo", "chat", "status", "replan", "leave", "pause", "resume", "plan", "bench")

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
    add_up(commands)
    add_demo(commands)
    add_chat(commands)
    add_status(commands)
    add_operator_commands(commands)
    add_plan(commands)
    add_bench(commands)
    return parser
