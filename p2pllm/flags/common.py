"""What the commands' flags share: help that names defaults, and typed values that are checked."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from p2pllm.config import API_PORT
from p2pllm.errors import UsageError

__all__ = [
    "DEFAULT_API",
    "Help",
    "add_model_flag",
    "add_model_flags",
    "command",
    "port",
    "positive",
    "temperature",
    "typed",
]

MAX_THREADS = 1024
DEFAULT_API = f"http://127.0.0.1:{API_PORT}"


class Help(argparse.HelpFormatter):
    """Names the default of a flag where it has one and the help does not."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        plain = action.default in (None, False, argparse.SUPPRESS, ())
        if plain or action.help is None or "default" in action.help:
            return action.help
        return f"{action.help} (default: %(default)s)"


def command(commands: Any, name: str, summary: str, detail: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=detail, formatter_class=Help
    )
    parser.add_argument("--debug", action="store_true", help="log more, and show tracebacks")
    return parser


def typed(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Our parsers' errors in the form that argparse reports as wrong usage."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise UsageError(f"{text!r} is not a port: write a number up to 65535, 0 for any free one")
    return int(text)


def positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 2**31 - 1:
        raise UsageError(f"{text!r} is not a number from 1 on")
    return int(text)


def threads(text: str) -> int:
    if positive(text) > MAX_THREADS:
        raise UsageError(f"{text!r} threads are more than {MAX_THREADS}")
    return int(text)


def temperature(text: str) -> float:
    if not text.replace(".", "", 1).isdecimal() or float(text) > 2:
        raise UsageError(f"{text!r} is not a temperature: write a number from 0 (greedy) to 2")
    return float(text)


def add_model_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="embedded",
        help="a Hugging Face directory, a GGUF file, a hub id (owner/name), "
        "or 'embedded' (SmolLM2-135M-Instruct)",
    )


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flag(parser)
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of weights and activations; default: bfloat16 where the hardware has it, else float32",
    )
    parser.add_argument(
        "--threads", type=typed(threads), help="torch threads; default: cores ÷ peers on this machine"
    )
