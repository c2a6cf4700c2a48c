"""A DHT-only node for a public address: the door through which peers find each other.

It holds records for a while and answers questions; it serves no layers, needs no torch, and trusts nobody.

    python bootstrap/bootstrap.py --host 0.0.0.0 --port 7600
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path

import structlog

from p2pllm.children import on_stdin_closed
from p2pllm.config import LINK_PORT, Address, default_data_dir, parse_addresses
from p2pllm.dht import DhtNode
from p2pllm.errors import P2PLLMError
from p2pllm.identity import Identity, hold_identity
from p2pllm.logs import configure_logs

__all__ = ["main"]

RETRY_S = 15.0

log = structlog.get_logger()


def main() -> int:
    """Run until SIGINT or SIGTERM; the exit code."""
    arguments = _parser().parse_args()
    configure_logs(json=arguments.log_json, debug=False)
    try:
        friends = parse_addresses(arguments.bootstrap) if arguments.bootstrap else ()
        with hold_identity(arguments.data_dir) as held:
            _run(_serve(held.identity, arguments, friends))
    except P2PLLMError as error:
        print(f"bootstrap: {error}", file=sys.stderr)  # noqa: T201  the one line a person is owed
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="A DHT-only node through which p2pllm peers find each other."
    )
    parser.add_argument("--host", default="0.0.0.0", help="IPv4 address to listen on (default: all)")  # noqa: S104
    parser.add_argument(
        "--port", type=_port, default=LINK_PORT, help=f"UDP port, 0 for any free one (default: {LINK_PORT})"
    )
    parser.add_argument(
        "--bootstrap",
        default="",
        metavar="H:P[,H:P]",
        help="other bootstrap nodes, to form one network with them",
    )
    parser.add_argument(
        "--data-dir", type=Path, default=default_data_dir() / "bootstrap", help="where the identity is kept"
    )
    parser.add_argument(
        "--until-eof", action="store_true", help="end when stdin closes, as when a parent process ends"
    )
    parser.add_argument("--log-json", action="store_true", help="one JSON object a line on stderr")
    return parser


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port: take a number from 0 to 65535")
    return int(text)


def _run(serve: Coroutine[None, None, None]) -> None:
    if sys.platform == "win32":
        asyncio.run(serve)
    else:
        import uvloop

        uvloop.run(serve)


async def _serve(identity: Identity, arguments: argparse.Namespace, friends: tuple[Address, ...]) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    if arguments.until_eof:
        on_stdin_closed(stop.set)
    node = DhtNode(identity)
    await node.start(arguments.host, arguments.port)
    print(f"listening on {arguments.host}:{node.port}", flush=True)  # noqa: T201  scripts wait for this line
    log.info("bootstrap_ready", peer=identity.peer_id, port=node.port)
    try:
        while not stop.is_set():
            if friends and not node.contacts() and not await node.bootstrap(friends):
                log.warning("bootstrap_alone", tried=friends, retry_in_s=RETRY_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), RETRY_S)
    finally:
        await node.close()
        log.info("bootstrap_stopped")


if __name__ == "__main__":
    raise SystemExit(main())
