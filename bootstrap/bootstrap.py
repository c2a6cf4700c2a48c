"""A DHT-only node for a public address: the door through which peers find each other.

It holds records of any number of swarms for a while and answers questions; it serves no layers, needs no
torch, and trusts nobody. Whom it has met it remembers on disk, and rejoins through them when it starts again.

    python bootstrap/bootstrap.py --host 0.0.0.0 --port 7600
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path

import structlog

from p2pllm.children import on_stdin_closed
from p2pllm.config import LINK_PORT, Address, default_data_dir, format_addresses, parse_addresses, parse_hosts
from p2pllm.dht import DhtNode
from p2pllm.errors import P2PLLMError, UsageError
from p2pllm.identity import Identity, hold_identity
from p2pllm.logs import configure_logs
from p2pllm.state import Remembered

__all__ = ["main"]

RETRY_S = 15.0
FIRST_REMEMBER_S = 5.0
REMEMBER_S = 60.0
HOSTS = "0.0.0.0,::"

log = structlog.get_logger()


def main() -> int:
    """Run until SIGINT or SIGTERM; the exit code."""
    arguments = _parser().parse_args()
    configure_logs(json=arguments.log_json, debug=False)
    try:
        friends = parse_addresses(arguments.bootstrap) if arguments.bootstrap else ()
        with hold_identity(arguments.data_dir, alone=True) as held:
            remembered = Remembered.load(arguments.data_dir / "bootstrap.json")
            _run(_serve(held.identity, arguments, friends, remembered))
    except P2PLLMError as error:
        print(f"bootstrap: {error}", file=sys.stderr)  # noqa: T201  the one line a person is owed
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="A DHT-only node through which p2pllm peers find each other."
    )
    parser.add_argument(
        "--host",
        type=_hosts,
        default=_hosts(HOSTS),
        metavar="A[,A]",
        help=f"addresses to listen on, one IPv4 and one IPv6 at most (default: all, {HOSTS})",
    )
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
        "--data-dir",
        type=Path,
        default=default_data_dir() / "bootstrap",
        help="where its identity and its contacts are kept",
    )
    parser.add_argument(
        "--until-eof", action="store_true", help="end when stdin closes, as when a parent process ends"
    )
    parser.add_argument("--log-json", action="store_true", help="one JSON object a line on stderr")
    return parser


def _hosts(text: str) -> tuple[str, ...]:
    try:
        return parse_hosts(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


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


async def _serve(
    identity: Identity, arguments: argparse.Namespace, friends: tuple[Address, ...], remembered: Remembered
) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    if arguments.until_eof:
        on_stdin_closed(stop.set)
    node = DhtNode(identity)
    await node.start(arguments.host, arguments.port)
    addresses = format_addresses((host, node.port) for host in arguments.host)
    print(f"listening on {addresses}", flush=True)  # noqa: T201  scripts wait for this line
    log.info("bootstrap_ready", peer=identity.peer_id, port=node.port)
    try:
        async with asyncio.TaskGroup() as tasks:
            duties = [
                tasks.create_task(_stay_joined(node, friends, remembered)),
                tasks.create_task(_remember(node, remembered)),
            ]
            await stop.wait()
            for duty in duties:
                duty.cancel()
        await _save(node, remembered)
    finally:
        await node.close()
        log.info("bootstrap_stopped")


async def _stay_joined(node: DhtNode, friends: tuple[Address, ...], remembered: Remembered) -> None:
    """Join through friends and whoever was met before, again and again for as long as nobody is known."""
    while True:
        known = tuple(dict.fromkeys((*friends, *remembered.peers)))
        if known and not node.contacts() and not await node.bootstrap(known):
            log.warning("bootstrap_alone", tried=len(known), retry_in_s=RETRY_S)
        await asyncio.sleep(RETRY_S)


async def _remember(node: DhtNode, remembered: Remembered) -> None:
    """Write down now and then who is there."""
    pause = FIRST_REMEMBER_S
    while True:
        await asyncio.sleep(pause)
        await _save(node, remembered)
        pause = REMEMBER_S


async def _save(node: DhtNode, remembered: Remembered) -> None:
    """The nodes that answered lately, off the loop; with nobody there, those of before are kept."""
    if good := node.good():
        remembered.peers = good
        await asyncio.to_thread(remembered.save)


if __name__ == "__main__":
    raise SystemExit(main())
