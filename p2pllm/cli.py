"""The command line: what there is to say, and who does it.

Parsing needs no torch, and neither do ``status`` and ``chat``: what is heavy is imported by the command that
needs it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from p2pllm import __version__
from p2pllm.config import (
    API_PORT,
    LINK_PORT,
    PeerConfig,
    default_data_dir,
    parse_addresses,
    parse_layers,
    parse_region,
    parse_size,
)
from p2pllm.errors import P2PLLMError, UsageError
from p2pllm.logs import configure_logs

__all__ = ["main"]

DEFAULT_API = f"http://127.0.0.1:{API_PORT}"
COMMANDS = ("up", "demo", "chat", "status")
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""

EPILOG = f"""\
examples:
  python -m p2pllm                                          start a new swarm with the embedded model
  python -m p2pllm --bootstrap 192.0.2.1:{LINK_PORT} --layers 0:16   join one and serve its first 16 layers
  python -m p2pllm demo "Why is the sky blue?"              a whole swarm on this machine, one answer
  python -m p2pllm status                                   who serves what

exit codes: 0 done, 1 failed (one line on stderr says why), 2 wrong usage
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] not in (*COMMANDS, "-h", "--help", "--version"):
        arguments.insert(0, "up")
    options = _parser().parse_args(arguments)
    try:
        command: Callable[[argparse.Namespace], int] = options.command
        return command(options)
    except KeyboardInterrupt:
        return INTERRUPTED
    except P2PLLMError as error:
        if options.debug:
            raise
        return _fail(error)
    except BaseExceptionGroup as group:
        known = _known(group)
        if known is None or options.debug:
            raise
        return _fail(known)


def _fail(error: P2PLLMError) -> int:
    print(f"p2pllm: error: {error}", file=sys.stderr)
    return error.exit_code


def _known(group: BaseExceptionGroup[BaseException]) -> P2PLLMError | None:
    """The error for people in a group of task failures, if every failure is one."""
    known, unknown = group.split(P2PLLMError)
    if known is None or unknown is not None:
        return None
    leaf: BaseException = known
    while isinstance(leaf, BaseExceptionGroup):
        leaf = leaf.exceptions[0]
    return leaf if isinstance(leaf, P2PLLMError) else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="p2pllm",
        description="A swarm of unlike machines that serves one language model, with no coordinator.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"p2pllm {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    _add_up(commands)
    _add_demo(commands)
    _add_chat(commands)
    _add_status(commands)
    return parser


def _command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str, detail: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=detail, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.set_defaults(command=run)
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
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{text!r} is not a number from 1 on")
    return int(text)


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
        "--threads", type=_typed(_positive), help="torch threads; default: cores ÷ peers on this machine"
    )


def _add_up(commands: Any) -> None:
    parser = _command(
        commands,
        "up",
        _up,
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
    parser.add_argument("--host", default="0.0.0.0", help="address for links (TCP) and the DHT (UDP)")  # noqa: S104
    parser.add_argument(
        "--port", type=_typed(_port), help=f"port for both; default: the first free one from {LINK_PORT} on"
    )
    parser.add_argument(
        "--advertise",
        type=lambda text: tuple(part for part in text.split(",") if part),
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
        "--memory",
        type=_typed(parse_size),
        metavar="SIZE",
        help="memory to offer, as 8GiB; default: what is free",
    )
    parser.add_argument(
        "--layers",
        type=_typed(parse_layers),
        metavar="A:B",
        help="decoder layers to serve, the end not included; default: the whole model",
    )
    parser.add_argument("--device", help="cpu, mps, cuda, cuda:1, …; default: the best one")
    parser.add_argument("--headless", action="store_true", help="no chat, even on a terminal")
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
        _demo,
        "a whole swarm of processes on this machine",
        "Start a bootstrap node and several peers on loopback, each its own process, and chat with them; "
        "or answer PROMPT and exit.",
    )
    parser.add_argument("prompt", nargs="?", help="answer this and exit")
    parser.add_argument("--peers", type=_typed(_positive), default=3, help="peers that share the layers")
    parser.add_argument("--regions", type=_typed(_positive), default=2, help="regions they are spread over")
    parser.add_argument("--max-tokens", type=_typed(_positive), default=256, help="longest answer to PROMPT")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=0, help="of sampling, when the temperature is above 0")
    parser.add_argument("--json", action="store_true", help="the answer as JSON, last line of stdout")
    _add_model_flags(parser)


def _add_chat(commands: Any) -> None:
    parser = _command(
        commands,
        "chat",
        _chat,
        "chat with a running peer",
        "Open the chat against a peer that is already running.",
    )
    parser.add_argument("--api", default=DEFAULT_API, metavar="URL", help="of the peer's API")


def _add_status(commands: Any) -> None:
    parser = _command(
        commands,
        "status",
        _status,
        "show the swarm",
        "Show who serves which layers, as a running peer sees it.",
    )
    parser.add_argument("--api", default=DEFAULT_API, metavar="URL", help="of the peer's API")
    parser.add_argument("--json", action="store_true", help="everything the peer knows, as JSON")


def _run(main: Coroutine[Any, Any, int]) -> int:
    """Run a command on uvloop where there is one."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if sys.platform != "win32":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


def _up(options: argparse.Namespace) -> int:
    fields = {name: getattr(options, name) for name in PeerConfig.__dataclass_fields__}
    config = PeerConfig(**fields)
    return _run(_peer(config, repl=not config.headless and sys.stdin.isatty()))


async def _peer(config: PeerConfig, *, repl: bool) -> int:
    """Run a peer, with the chat beside it when ``repl``."""
    from p2pllm.peer import run_peer
    from p2pllm.terminal import chat_beside

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if not repl:
        configure_logs(json=config.log_json, debug=config.debug)
        await run_peer(config, stop=stop)
        return 0
    log_file = config.data_dir / f"peer-{os.getpid()}.log"
    configure_logs(json=config.log_json, debug=config.debug, file=log_file)
    async with asyncio.TaskGroup() as tasks:
        listening: asyncio.Future[str] = loop.create_future()
        chat = tasks.create_task(chat_beside(listening, stop, log_file))
        await run_peer(config, stop=stop, on_listening=listening.set_result)
        chat.cancel()
    return 0


def _demo(options: argparse.Namespace) -> int:
    from p2pllm.demo import Demo, run_demo

    demo = Demo(
        prompt=options.prompt,
        peers=options.peers,
        regions=min(options.regions, options.peers),
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=options.seed,
        json=options.json,
        model=options.model,
        dtype=options.dtype,
        threads=options.threads,
        debug=options.debug,
    )
    return _run(run_demo(demo))


def _chat(options: argparse.Namespace) -> int:
    from p2pllm.terminal import chat_with

    return _run(chat_with(options.api))


def _status(options: argparse.Namespace) -> int:
    from p2pllm.terminal import show_status

    return _run(show_status(options.api, as_json=options.json))
