"""The command line: runs one command and turns what goes wrong into one line and an exit code.

Neither parsing nor ``status``, ``chat`` and ``plan`` need torch: what is heavy is imported by the command
that needs it.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from p2pllm.addresses import Listening
from p2pllm.children import on_stdin_closed
from p2pllm.config import INTERRUPTED, PeerConfig
from p2pllm.errors import P2PLLMError
from p2pllm.flags import COMMANDS, make_parser
from p2pllm.logs import configure_logs

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] not in (*COMMANDS, "-h", "--help", "--version"):
        arguments.insert(0, "up")
    options = make_parser().parse_args(arguments)
    commands = {"up": _up, "demo": _demo, "chat": _chat, "status": _status, "plan": _plan, "bench": _bench}
    commands |= dict.fromkeys(("replan", "leave", "pause", "resume"), _operate)
    try:
        return commands[options.command](options)
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
    return _run(_peer(config, repl=not config.headless and sys.stdin is not None and sys.stdin.isatty()))


async def _peer(config: PeerConfig, *, repl: bool) -> int:
    """Run a peer, with the chat beside it when ``repl``."""
    from p2pllm.peer import run_peer
    from p2pllm.terminal import chat_beside

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def leave() -> None:
        stop.set()
        for number in (signal.SIGINT, signal.SIGTERM):
            # The second time means now: a thread may be in the middle of a long download.
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, leave)
    if config.until_eof:
        on_stdin_closed(stop.set)
    if not repl:
        configure_logs(json=config.log_json, debug=config.debug)
        await run_peer(config, stop=stop)
        return 0
    log_file = config.data_dir / "peer.log"
    configure_logs(json=config.log_json, debug=config.debug, file=log_file)
    async with asyncio.TaskGroup() as tasks:
        listening: asyncio.Future[Listening] = loop.create_future()
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

    return _run(chat_with(options.api, options.api_key))


def _status(options: argparse.Namespace) -> int:
    from p2pllm.terminal import show_status

    return _run(
        show_status(
            options.api,
            options.api_key,
            as_json=options.json,
            as_cluster=options.cluster,
            watch=options.watch,
        )
    )


def _operate(options: argparse.Namespace) -> int:
    from p2pllm.terminal import operate

    force = options.command == "replan" and options.force
    return _run(operate(options.api, options.command, force=force))


def _plan(options: argparse.Namespace) -> int:
    from p2pllm.plan import show_plan

    return show_plan(options.cluster, as_json=options.json, certified=options.certify)


def _bench(options: argparse.Namespace) -> int:
    from p2pllm.bench import bench_decode, bench_dht, bench_recovery, bench_scheduling, bench_throughput

    if options.what in ("decode", "throughput"):
        amount = {"as_json": options.json, "tokens": options.tokens, "rounds": options.rounds}
        model = {"model": options.model, "threads": options.threads}
        if options.what == "decode":
            return _run(bench_decode(**model, **amount))
        return _run(bench_throughput(**model, **amount, dtype=options.dtype))
    if options.what == "recovery":
        amount = {"runs": options.runs, "tokens": options.tokens, "quick": options.quick}
        return _run(bench_recovery(as_json=options.json, model=options.model, seed=options.seed, **amount))
    if options.what == "dht":
        return bench_dht(
            as_json=options.json,
            peers=options.peers,
            scenarios=options.scenarios,
            seconds=options.seconds,
            processes=options.processes,
            encrypted=not options.insecure_links,
            seed=options.seed,
        )
    return bench_scheduling(
        as_json=options.json,
        plot=options.plot,
        quick=options.quick,
        max_peers=options.max_peers,
        seed=options.seed,
    )
