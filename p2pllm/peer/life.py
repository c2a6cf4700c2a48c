"""How a peer starts, serves, and ends."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from typing import Any

import structlog

from p2pllm.addresses import Listening, advertised, is_loopback
from p2pllm.config import Address, PeerConfig, format_addresses
from p2pllm.errors import UsageError
from p2pllm.execution import open_checkpoint, wait_briefly
from p2pllm.identity import hold_identity
from p2pllm.machine import model_size, survey
from p2pllm.peer.parts import Parts
from p2pllm.ports import take_api_port, take_link_port
from p2pllm.records import read_swarm_key
from p2pllm.scheduling import fit_slice
from p2pllm.serving import ApiKeys
from p2pllm.state import Remembered
from p2pllm.transport import make_certificate

__all__ = ["run_peer"]

GOODBYE_S = 1.0
MOVED_CHECK_S = 10.0
"""How often a peer looks whether its own addresses have changed."""

log = structlog.get_logger()


async def run_peer(
    config: PeerConfig,
    *,
    stop: asyncio.Event,
    on_listening: Callable[[Listening], None] = lambda _listening: None,
) -> None:
    """Run one peer until ``stop`` is set or its operator has it leave.

    Args:
        on_listening: told once where the peer listens (``/healthz`` of its API says when it can answer).

    Raises: UsageError, ModelError (alone or in an ExceptionGroup) with what to change.
    """
    wait_briefly()
    if not (is_loopback(config.api_host) or config.api_open or config.api_key_file):
        raise UsageError(
            f"an API on {config.api_host} is open to all who can reach it: pass --api-key-file, or "
            "--api-open if you want that"
        )
    keys = None if config.api_key_file is None else await asyncio.to_thread(ApiKeys, config.api_key_file)
    secret = None if config.swarm_key_file is None else read_swarm_key(config.swarm_key_file)
    async with AsyncExitStack() as stack:
        checkpoint = await asyncio.to_thread(open_checkpoint, config.model)
        # It reads a little of every tensor, from the hub if need be; from here on it is known.
        await asyncio.to_thread(lambda: checkpoint.fingerprint)
        held = stack.enter_context(await asyncio.to_thread(hold_identity, config.data_dir))
        machine = await asyncio.to_thread(lambda: survey(config, held.local_peers))
        size = model_size(checkpoint, machine.dtype, quant=machine.quant, device=machine.device)
        if config.layers is not None:
            fit_slice(size, machine.memory_bytes, config.layers)
        parts = Parts(
            config=config,
            held=held,
            remembered=await asyncio.to_thread(Remembered.load, held.state_path),
            certificate=None if config.insecure_links else await asyncio.to_thread(make_certificate),
            secret=secret,
            keys=keys,
            checkpoint=checkpoint,
            machine=machine,
            size=size,
        )
        stack.push_async_callback(parts.close)
        if not stop.is_set():
            await parts.prepare()
        if stop.is_set():
            return  # before anybody has heard of it
        peer = Peer(parts)
        on_listening(await peer.listen(stack))
        await peer.serve_until(stop)


class Peer:
    """One peer while it runs."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._port = 0

    async def listen(self, stack: AsyncExitStack) -> Listening:
        """Take the ports: links (TCP) and DHT (UDP) on the same number, then the API. Raises UsageError."""
        parts, config = self._parts, self._parts.config
        tls = None if parts.certificate is None else parts.certificate.server_context()
        server = await take_link_port(parts.links, parts.dht, config.host, config.port, tls)
        self._port = server.port
        stack.push_async_callback(parts.dht.close)
        stack.push_async_callback(server.close)
        stack.push_async_callback(parts.links.close)
        parts.portrait.addresses = await asyncio.to_thread(self._find_addresses)
        api = await take_api_port(parts.api.application(), config.api_host, config.api_port)
        stack.push_async_callback(api.close)
        host = f"[{config.api_host}]" if ":" in config.api_host else config.api_host
        listening = Listening(
            f"http://{host}:{api.port}",
            self._join_command(),
            "" if parts.keys is None else parts.keys.own,
        )
        log.info("api_listening", url=listening.api_url)
        log.info(
            "peer_listening",
            peer=parts.own,
            addresses=format_addresses(parts.portrait.addresses),
            region=config.region,
            encrypted=not config.insecure_links,
        )
        if not config.bootstrap:
            log.info("swarm_started", join_with=listening.join_command)
        return listening

    async def serve_until(self, stop: asyncio.Event) -> None:
        """Join, serve what the swarm needs; leave when ``stop`` is set or the operator says so."""
        parts = self._parts
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(parts.swarm.run()),
                group.create_task(self._serve()),
                group.create_task(self._watch_addresses()),
            ]
            await _first(stop.wait(), parts.commands.leaving.wait())
            log.info("peer_leaving", grace_s=parts.config.grace)
            if not stop.is_set():
                parts.commands.pause()
                await _first(stop.wait(), parts.allocator.empty(), asyncio.sleep(parts.config.grace))
            parts.portrait.leaving = True
            parts.api.unavailable = "this peer is leaving the swarm: ask another one"
            parts.stages.accepting = False
            parts.swarm.soon()
            await _first(self._idle(), asyncio.sleep(parts.config.grace))
            for task in tasks:
                task.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                await parts.swarm.goodbye()

    async def _idle(self) -> None:
        """Wait until no session is left here, neither as a stage nor for a client of the API."""
        await self._parts.stages.idle()
        await self._parts.api.idle()

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as group:
            # A peer whose executor is broken must not stay in the view as a holder.
            group.create_task(self._parts.executor.watch())
            group.create_task(self._parts.allocator.run())
            if self._parts.keys is not None:
                group.create_task(self._parts.keys.follow())
            await self._parts.stages.run()

    async def _watch_addresses(self) -> None:
        """Tell the swarm when this machine has moved to another network."""
        while True:
            await asyncio.sleep(MOVED_CHECK_S)
            found = await asyncio.to_thread(self._find_addresses)
            if found != self._parts.portrait.addresses:
                self._parts.portrait.addresses = found
                log.info("addresses_changed", addresses=format_addresses(found))
                self._parts.swarm.soon()

    def _find_addresses(self) -> tuple[Address, ...]:
        config = self._parts.config
        # Names are resolved once: a resolver that hangs would take a thread each time.
        towards = self._parts.dht.good()[:2] or config.bootstrap
        return advertised(config.host, self._port, config.advertise, towards)

    def _join_command(self) -> str:
        config = self._parts.config
        model = "" if config.model == "embedded" else f" --model {shlex.quote(config.model)}"
        key = (
            ""
            if config.swarm_key_file is None
            else f" --swarm-key-file {shlex.quote(str(config.swarm_key_file))}"
        )
        links = " --insecure-links" if config.insecure_links else ""
        address = format_addresses(self._parts.portrait.addresses[:1])
        return f"python -m p2pllm --bootstrap {address}{model}{key}{links}"


async def _first(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait until one of these is over, and end the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
