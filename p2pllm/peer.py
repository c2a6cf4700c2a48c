"""The composition root: builds the parts of a peer, joins them, starts and stops them.

Configuration ends here; the parts get values and each other.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import shlex
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any

import structlog

from p2pllm import transport
from p2pllm.addresses import Listening, advertised, is_loopback
from p2pllm.config import Address, PeerConfig, format_addresses, format_bytes
from p2pllm.dht import DhtNode
from p2pllm.errors import LinkError, UsageError
from p2pllm.execution import (
    ChatTokenizer,
    Checkpoint,
    Executor,
    open_checkpoint,
    wait_briefly,
    weight_bytes,
)
from p2pllm.identity import HeldIdentity, hold_identity
from p2pllm.machine import Machine, model_size, offer, survey
from p2pllm.portrait import MAX_NAME, Portrait
from p2pllm.ports import take_api_port, take_link_port
from p2pllm.records import SwarmBody, SwarmKey, read_swarm_key, swarm_id
from p2pllm.scheduling import ModelSize, PeerId, fit_slice, kv_room
from p2pllm.serving import (
    SECRET_BYTES,
    Allocator,
    Api,
    ApiKeys,
    Completer,
    Generator,
    Network,
    Router,
    Stages,
    Status,
)
from p2pllm.state import Remembered
from p2pllm.swarm import Allocation, Prober, Swarm, SwarmPlan
from p2pllm.transport import (
    Certificate,
    Failed,
    Gossip,
    Links,
    Message,
    Opened,
    Ping,
    Pong,
    Token,
    make_certificate,
)

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
        peer = Peer(
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
        stack.push_async_callback(peer.close)
        if not stop.is_set():
            await peer.prepare()
        if stop.is_set():
            return  # before anybody has heard of it
        on_listening(await peer.listen(stack))
        await peer.serve_until(stop)


class Peer:
    """One peer: its parts and how frames and facts pass between them."""

    def __init__(
        self,
        *,
        config: PeerConfig,
        held: HeldIdentity,
        remembered: Remembered,
        certificate: Certificate | None,
        secret: SwarmKey | None,
        keys: ApiKeys | None,
        checkpoint: Checkpoint,
        machine: Machine,
        size: ModelSize,
    ) -> None:
        identity = held.identity
        self._config = config
        self._own: PeerId = identity.peer_id
        self._certificate = certificate
        self._checkpoint = checkpoint
        swarm = (secret.swarm_id if secret else swarm_id)(checkpoint.fingerprint)
        self._port = 0
        self._rng = random.Random()
        self._told_to_leave = asyncio.Event()

        self._executor = Executor(
            checkpoint,
            dtype=machine.dtype,
            device=machine.device,
            threads=machine.threads,
            quant=machine.quant,
        )
        mine = offer(self._own, config.region, machine, size)
        if not any(mine.capacity):
            log.warning("no_room_for_layers", memory=format_bytes(machine.memory_bytes), do="raise --memory")
        self._allocation = Allocation(
            self._own, checkpoint.layers, mine.capacity, pinned=config.layers, grace_s=config.grace
        )
        self._links = Links(
            identity,
            swarm,
            certificate=certificate,
            secret=secret,
            on_message=self._receive,
            on_down=self._peer_down,
        )
        self._dht = DhtNode(identity, rng=self._rng)
        self._prober = Prober(self._links)
        self._portrait = Portrait(
            config=config,
            machine=machine,
            offer=mine,
            certificate=certificate,
            executor=self._executor,
            allocation=self._allocation,
            links=self._links,
            rho=self._prober.estimates.published,
        )
        name = "".join(letter if letter.isprintable() else "?" for letter in checkpoint.name)[:MAX_NAME]
        self._swarm = Swarm(
            identity=identity,
            swarm=swarm,
            secret=secret,
            dht=self._dht,
            links=self._links,
            model=SwarmBody(name, checkpoint.fingerprint, checkpoint.layers),
            bootstrap=config.bootstrap,
            new_swarm=config.new_swarm,
            prober=self._prober,
            describe=self._portrait.describe,
            measure=self._portrait.measure,
            on_plan=self._on_plan,
            on_news=self._on_news,
            remembered=remembered,
            rng=self._rng,
        )
        self._stages = Stages(
            own=self._own,
            hidden=checkpoint.hidden,
            executor=self._executor,
            send=self._links.send,
            drain=self._links.drain,
            connect=self._connect,
            changed=self._sessions_changed,
            upload=self._links.upload_to,
        )
        self._router = Router(view=self._swarm.view, layers=checkpoint.layers, own=self._own, rng=self._rng)
        self._generator: Generator | None = None
        status = Status(
            model=name,
            size=size,
            parameters=size.layer_bytes / weight_bytes(machine.dtype, machine.quant),
            swarm=self._swarm,
            router=self._router,
            bootstrap=format_addresses(config.bootstrap),
            loading=lambda: self._allocator.loading,
        )
        self._allocator = Allocator(
            allocation=self._allocation,
            executor=self._executor,
            peers=status.peers,
            leaderless_s=lambda: self._swarm.leadership.leaderless_s(time.monotonic()),
            kv_room=partial(kv_room, size, machine.memory_bytes),
            changed=self._swarm.soon,
            hand_over=self._stages.hand_over,
        )
        self._api_keys = keys
        self._api = Api(
            status=status,
            operator=self,
            rng=self._rng,
            keys=keys,
            queue_timeout_s=config.queue_timeout,
            engine=self._executor.stats,
        )

    async def prepare(self) -> None:
        """Read the tokenizer and get ready to load layers. Raises ModelError for a model that cannot be run.

        Both import a lot, which holds up the event loop; so it is over before the swarm counts on this peer.
        """
        tokenizer = await asyncio.to_thread(ChatTokenizer, self._checkpoint)
        await self._executor.prepare()
        network = Network(
            own=self._own,
            send=self._links.send,
            connect=self._connect,
            eos=tokenizer.eos_ids,
            vocabulary=self._checkpoint.vocabulary,
            numerics=self._numerics,
            secret=secrets.token_bytes(SECRET_BYTES),
        )
        self._generator = Generator(
            router=self._router, network=network, context=self._checkpoint.context, rng=self._rng
        )
        self._api.completer = Completer(tokenizer, self._generator)

    async def close(self) -> None:
        """Leave no thread."""
        await self._executor.close()

    async def listen(self, stack: AsyncExitStack) -> Listening:
        """Take the ports: links (TCP) and DHT (UDP) on the same number, then the API. Raises UsageError."""
        config = self._config
        tls = None if self._certificate is None else self._certificate.server_context()
        server = await take_link_port(self._links, self._dht, config.host, config.port, tls)
        self._port = server.port
        stack.push_async_callback(self._dht.close)
        stack.push_async_callback(server.close)
        stack.push_async_callback(self._links.close)
        self._portrait.addresses = await asyncio.to_thread(self._find_addresses)
        api = await take_api_port(self._api.application(), config.api_host, config.api_port)
        stack.push_async_callback(api.close)
        host = f"[{config.api_host}]" if ":" in config.api_host else config.api_host
        listening = Listening(
            f"http://{host}:{api.port}",
            self._join_command(),
            "" if self._api_keys is None else self._api_keys.own,
        )
        log.info("api_listening", url=listening.api_url)
        log.info(
            "peer_listening",
            peer=self._own,
            addresses=format_addresses(self._portrait.addresses),
            region=config.region,
            encrypted=not config.insecure_links,
        )
        if not config.bootstrap:
            log.info("swarm_started", join_with=listening.join_command)
        return listening

    async def serve_until(self, stop: asyncio.Event) -> None:
        """Join, serve what the swarm needs; leave when ``stop`` is set or the operator says so."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._swarm.run()),
                group.create_task(self._serve()),
                group.create_task(self._watch_addresses()),
            ]
            await _first(stop.wait(), self._told_to_leave.wait())
            log.info("peer_leaving", grace_s=self._config.grace)
            if not stop.is_set():
                self.pause()
                await _first(stop.wait(), self._allocator.empty(), asyncio.sleep(self._config.grace))
            self._portrait.leaving = True
            self._api.unavailable = "this peer is leaving the swarm: ask another one"
            self._stages.accepting = False
            self._swarm.soon()
            await _first(self._idle(), asyncio.sleep(self._config.grace))
            for task in tasks:
                task.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                await self._swarm.goodbye()

    async def _idle(self) -> None:
        """Wait until no session is left here, neither as a stage nor for a client of the API."""
        await self._stages.idle()
        await self._api.idle()

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as group:
            # A peer whose executor is broken must not stay in the view as a holder.
            group.create_task(self._executor.watch())
            group.create_task(self._allocator.run())
            if self._api_keys is not None:
                group.create_task(self._api_keys.follow())
            await self._stages.run()

    async def _watch_addresses(self) -> None:
        """Tell the swarm when this machine has moved to another network."""
        while True:
            await asyncio.sleep(MOVED_CHECK_S)
            found = await asyncio.to_thread(self._find_addresses)
            if found != self._portrait.addresses:
                self._portrait.addresses = found
                log.info("addresses_changed", addresses=format_addresses(found))
                self._swarm.soon()

    def _find_addresses(self) -> tuple[Address, ...]:
        config = self._config
        # Names are resolved once: a resolver that hangs would take a thread each time.
        towards = self._dht.good()[:2] or config.bootstrap
        return advertised(config.host, self._port, config.advertise, towards)

    def _join_command(self) -> str:
        config = self._config
        model = "" if config.model == "embedded" else f" --model {shlex.quote(config.model)}"
        key = (
            ""
            if config.swarm_key_file is None
            else f" --swarm-key-file {shlex.quote(str(config.swarm_key_file))}"
        )
        links = " --insecure-links" if config.insecure_links else ""
        address = format_addresses(self._portrait.addresses[:1])
        return f"python -m p2pllm --bootstrap {address}{model}{key}{links}"

    # What the operator says

    def replan(self, *, force: bool) -> None:
        """Ask the leader for a new placement, in this peer's record."""
        self._portrait.replans += 1
        self._portrait.force = force
        log.info("replan_requested", force=force)
        self._swarm.soon()

    def leave(self) -> None:
        """Hand over, finish, and end."""
        self._told_to_leave.set()

    def pause(self) -> None:
        """Hand the layers over and hold none."""
        self._portrait.paused = True
        self._allocation.pause()
        self._allocator.soon()
        self._swarm.soon()

    def resume(self) -> None:
        """Take layers again."""
        self._portrait.paused = False
        self._allocation.resume()
        self._allocator.soon()
        self._swarm.soon()

    # What others say

    async def _connect(self, peer: PeerId) -> None:
        """Bring up the link to a peer of the view."""
        if peer == self._own:
            return
        state = self._swarm.view.peer(peer, time.monotonic())
        if state is None:
            raise LinkError(f"peer {peer[:8]} is not in the view")
        await self._links.ensure(peer, state.body.addresses, state.body.certificate)

    def _numerics(self, peer: PeerId) -> str:
        """How a peer of the view rounds; empty if it is in none."""
        state = self._swarm.view.peer(peer, time.monotonic())
        return "" if state is None else f"{state.body.dtype}/{state.body.quantization}"

    def _receive(self, sender: PeerId, message: Message) -> None:
        match message:
            case Opened() | Failed() | Token(stage=transport.ENTRY_STAGE):
                if self._generator is not None:
                    self._generator.receive(sender, message)
            case Gossip():
                self._swarm.receive(sender, message)
            case Ping() | Pong():
                pass  # the link itself answers these
            case _:
                self._stages.receive(sender, message)

    def _peer_down(self, peer: PeerId) -> None:
        self._stages.peer_down(peer)
        self._swarm.link_down(peer)
        if self._generator is not None:
            self._generator.peer_down(peer)

    def _on_plan(self, plan: SwarmPlan) -> None:
        if self._allocation.follow(plan):
            self._allocator.soon()

    def _on_news(self) -> None:
        self._router.follow()

    def _sessions_changed(self) -> None:
        self._swarm.serving()
        self._swarm.soon()


async def _first(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait until one of these is over, and end the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
