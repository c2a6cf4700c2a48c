"""The composition root: builds the parts of a peer, joins them, starts and stops them.

Configuration ends here; the parts get values and each other.
"""

from __future__ import annotations

import asyncio
import random
import shlex
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

import psutil
import structlog
from aiohttp import web

from p2pllm import __version__, transport
from p2pllm.addresses import Listening, advertised, is_loopback
from p2pllm.config import API_PORT, LINK_PORT, PORT_TRIES, Address, PeerConfig, format_addresses
from p2pllm.dht import DhtNode
from p2pllm.errors import LinkError, NoRouteError, PortTakenError, UsageError
from p2pllm.execution import ChatTokenizer, Checkpoint, Executor, open_checkpoint
from p2pllm.identity import Identity, hold_identity
from p2pllm.machine import Machine, model_size, survey
from p2pllm.records import MetricsBody, PeerBody, Span, SpanState, SwarmBody, swarm_id
from p2pllm.scheduling import Chain, Fit, ModelSize, PeerId, capacity, fit_slice, uncovered
from p2pllm.serving import Api, Completer, Generator, Network, Router, Stages, chain_json, swarm_json
from p2pllm.swarm import Membership, Prober, Publisher, View
from p2pllm.transport import (
    LINK_PATH,
    Failed,
    Links,
    Message,
    Opened,
    Ping,
    Pong,
    Server,
    Token,
    serve,
)

__all__ = ["run_peer"]

GOODBYE_S = 1.0
MAX_NAME = 96
"""Characters of a name in a record."""

log = structlog.get_logger()


async def run_peer(
    config: PeerConfig,
    *,
    stop: asyncio.Event,
    on_listening: Callable[[Listening], None] = lambda _listening: None,
) -> None:
    """Run one peer until ``stop`` is set.

    Args:
        on_listening: told once where the peer listens (``/healthz`` of its API says when it can answer).

    Raises: UsageError, ModelError (alone or in an ExceptionGroup) with what to change.
    """
    if not (is_loopback(config.api_host) or config.api_open):
        raise UsageError(
            f"an API on {config.api_host} is open to all who can reach it: pass --api-open if you want that"
        )
    async with AsyncExitStack() as stack:
        checkpoint = await asyncio.to_thread(open_checkpoint, config.model)
        # It reads a little of every tensor, from the hub if need be; from here on it is known.
        await asyncio.to_thread(lambda: checkpoint.fingerprint)
        held = stack.enter_context(await asyncio.to_thread(hold_identity, config.data_dir))
        machine = await asyncio.to_thread(lambda: survey(config, held.local_peers))
        size = model_size(checkpoint, machine.dtype)
        fit = fit_slice(size, machine.memory_bytes, config.layers)
        peer = Peer(
            config=config,
            identity=held.identity,
            checkpoint=checkpoint,
            machine=machine,
            size=size,
            fit=fit,
        )
        on_listening(await peer.listen(stack))
        await peer.serve_until(stop)


class Peer:
    """One peer: its parts and how frames and facts pass between them."""

    def __init__(
        self,
        *,
        config: PeerConfig,
        identity: Identity,
        checkpoint: Checkpoint,
        machine: Machine,
        size: ModelSize,
        fit: Fit,
    ) -> None:
        self._config = config
        self._own: PeerId = identity.peer_id
        self._checkpoint = checkpoint
        self._machine = machine
        self._capacity = capacity(size, machine.memory_bytes)
        self._swarm = swarm_id(checkpoint.fingerprint)
        self._state: SpanState = "loading"
        self._leaving = False
        self._addresses: tuple[Address, ...] = ()
        self._rng = random.Random()

        self._executor = Executor(
            checkpoint,
            fit.start,
            fit.end,
            dtype=machine.dtype,
            device=machine.device,
            threads=machine.threads,
            kv_bytes=fit.kv_bytes,
        )
        self._view = View(self._swarm)
        self._links = Links(identity, self._swarm, on_message=self._receive, on_down=self._peer_down)
        self._dht = DhtNode(identity, rng=self._rng)
        self._prober = Prober(self._links)
        self._model = "".join(letter if letter.isprintable() else "?" for letter in checkpoint.name)[
            :MAX_NAME
        ]
        model = SwarmBody(self._model, checkpoint.fingerprint, checkpoint.layers)
        self._publisher = Publisher(
            identity=identity,
            dht=self._dht,
            swarm=self._swarm,
            view=self._view,
            model=model,
            describe=self._describe,
            measure=self._measure,
            rng=self._rng,
        )
        self._membership = Membership(
            own=self._own,
            dht=self._dht,
            swarm=self._swarm,
            model=model,
            view=self._view,
            publisher=self._publisher,
            prober=self._prober,
            bootstrap=config.bootstrap,
            new_swarm=config.new_swarm,
        )
        self._stages = Stages(
            own=self._own,
            hidden=checkpoint.hidden,
            executor=self._executor,
            send=self._links.send,
            drain=self._links.drain,
            connect=self._connect,
            changed=self._publisher.soon,
        )
        self._router = Router(view=self._view, layers=checkpoint.layers, own=self._own, rng=self._rng)
        self._generator: Generator | None = None
        self._api = Api(
            model=self._model,
            swarm=self._swarm_json,
            missing=self._missing,
            stages=lambda chain: chain_json(chain, self._view.peers(time.monotonic())),
            rng=self._rng,
        )

    async def listen(self, stack: AsyncExitStack) -> Listening:
        """Take the ports: links (TCP) and DHT (UDP) on the same number, then the API. Raises UsageError."""
        config = self._config
        server = await self._listen_links()
        stack.push_async_callback(self._executor.close)
        stack.push_async_callback(self._dht.close)
        stack.push_async_callback(server.close)
        stack.push_async_callback(self._links.close)
        self._addresses = await asyncio.to_thread(
            advertised, config.host, server.port, config.advertise, config.bootstrap
        )
        api = await self._listen_api()
        stack.push_async_callback(api.close)
        host = f"[{config.api_host}]" if ":" in config.api_host else config.api_host
        listening = Listening(f"http://{host}:{api.port}", self._join_command())
        log.info("api_listening", url=listening.api_url)
        log.info(
            "peer_listening",
            peer=self._own,
            addresses=format_addresses(self._addresses),
            region=config.region,
        )
        if not config.bootstrap:
            log.info("swarm_started", join_with=listening.join_command)
        return listening

    def _join_command(self) -> str:
        start, end, layers = self._executor.start, self._executor.end, self._checkpoint.layers
        rest = f" --layers {end}:{layers}" if end < layers else f" --layers 0:{start}" if start else ""
        model = "" if self._config.model == "embedded" else f" --model {shlex.quote(self._config.model)}"
        return f"python -m p2pllm --bootstrap {format_addresses(self._addresses[:1])}{model}{rest}"

    async def serve_until(self, stop: asyncio.Event) -> None:
        """Load, join, serve; leave when ``stop`` is set."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._membership.run()),
                group.create_task(self._load_and_serve()),
            ]
            await stop.wait()
            log.info("peer_leaving", peer=self._own[:8])
            for task in tasks:
                task.cancel()
        self._leaving = True
        try:
            async with asyncio.timeout(GOODBYE_S):
                await self._publisher.publish()
        except TimeoutError:
            log.warning("goodbye_not_delivered")

    async def _listen_links(self) -> Server:
        """TCP for the links and UDP for the DHT on the same port."""
        application = web.Application()
        application.router.add_get(LINK_PATH, self._links.accept)

        async def take(port: int) -> Server:
            server = await serve(application, self._config.host, port)
            try:
                await self._dht.start(self._config.host, server.port)
            except UsageError:
                await server.close()
                raise
            return server

        return await _first_free(self._config.port, LINK_PORT, take)

    async def _listen_api(self) -> Server:
        async def take(port: int) -> Server:
            return await serve(self._api.application(), self._config.api_host, port, flag="--api-port")

        return await _first_free(self._config.api_port, API_PORT, take)

    async def _load_and_serve(self) -> None:
        start, end = self._executor.start, self._executor.end
        log.info("loading", layers=f"{start}:{end}", dtype=self._machine.dtype, threads=self._machine.threads)
        began = time.monotonic()
        tokenizer = await asyncio.to_thread(ChatTokenizer, self._checkpoint)
        await self._executor.load(_progress_log())
        network = Network(
            own=self._own,
            send=self._links.send,
            connect=self._connect,
            ping=self._links.ping,
            eos=tokenizer.eos_ids,
            vocabulary=self._checkpoint.vocabulary,
        )
        self._generator = Generator(
            router=self._router, network=network, context=self._checkpoint.context, rng=self._rng
        )
        self._api.completer = Completer(tokenizer, self._generator)
        self._state = "ready"
        self._publisher.soon()
        log.info("ready", layers=f"{start}:{end}", seconds=round(time.monotonic() - began, 2))
        async with asyncio.TaskGroup() as group:
            # A peer whose executor is broken must not stay in the view as a holder.
            group.create_task(self._executor.watch())
            await self._stages.run()

    async def _connect(self, peer: PeerId) -> None:
        """Bring up the link to a peer of the view."""
        if peer == self._own:
            return
        state = self._view.peer(peer, time.monotonic())
        if state is None:
            raise LinkError(f"peer {peer[:8]} is not in the view")
        await self._links.ensure(peer, state.body.addresses)

    def _receive(self, sender: PeerId, message: Message) -> None:
        match message:
            case Opened() | Failed() | Token(stage=transport.ENTRY_STAGE):
                if self._generator is not None:
                    self._generator.receive(sender, message)
            case Ping() | Pong():
                pass  # the link itself answers these
            case _:
                self._stages.receive(sender, message)

    def _peer_down(self, peer: PeerId) -> None:
        self._stages.peer_down(peer)
        if self._generator is not None:
            self._generator.peer_down(peer)

    def _describe(self) -> PeerBody:
        machine = self._machine
        return PeerBody(
            addresses=self._addresses,
            region=self._config.region,
            hardware=machine.name[:MAX_NAME],
            memory_bytes=machine.memory_bytes,
            flops=machine.flops,
            bandwidth=machine.bandwidth,
            capacity=self._capacity,
            dtype=machine.dtype,
            quantization="none",
            software=__version__,
            leaving=self._leaving,
        )

    def _measure(self) -> MetricsBody:
        stats = self._executor.stats()
        return MetricsBody(
            spans=(Span(self._executor.start, self._executor.end, self._state),),
            generation=0,
            layer_s=stats.layer_s,
            head_s=stats.head_s,
            wait_s=stats.wait_s,
            running=stats.running,
            waiting=stats.waiting,
            free_kv_blocks=stats.kv_blocks_free,
            memory_used=psutil.Process().memory_info().rss,
            rho=self._prober.estimates.published(),
        )

    def _missing(self) -> tuple[tuple[int, int], ...]:
        """Layers that nobody is ready to serve."""
        peers = self._view.peers(time.monotonic())
        return uncovered(self._checkpoint.layers, [holder for state in peers for holder in state.holders()])

    def _swarm_json(self) -> dict[str, Any]:
        route: Chain | None = None
        with suppress(NoRouteError):
            route = self._router.chain(expected_tokens=1, preview=True)
        return swarm_json(
            swarm=self._swarm,
            model=self._model,
            layers=self._checkpoint.layers,
            own=self._own,
            peers=self._view.peers(time.monotonic()),
            route=route,
            bootstrap=format_addresses(self._config.bootstrap),
            contacts=len(self._dht.contacts()),
            missing=self._missing(),
        )


def _progress_log() -> Callable[[int, int], None]:
    """Logs each further eighth of the weights."""
    logged = 0

    def progress(done: int, total: int) -> None:
        nonlocal logged
        eighth = 8 * done // max(total, 1)
        if eighth > logged:
            logged = eighth
            log.info("loading_progress", share=eighth / 8)

    return progress


async def _first_free(given: int | None, default: int, take: Callable[[int], Awaitable[Server]]) -> Server:
    """Take the given port, or else the first one from ``default`` on that is free. Raises UsageError."""
    if given:
        return await take(given)
    # With 0 the system names a free TCP port, and each try another one: its UDP twin may be taken.
    *first, last = [0] * PORT_TRIES if given == 0 else range(default, default + PORT_TRIES)
    for port in first:
        try:
            return await take(port)
        except PortTakenError:
            if port:
                log.info("port_taken", port=port, next=port + 1)
    return await take(last)
