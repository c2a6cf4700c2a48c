"""The composition root: builds the parts of a peer and joins them.

Configuration ends here; the parts get values and each other.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from functools import partial

import structlog

from p2pllm import transport
from p2pllm.config import PeerConfig, format_addresses, format_bytes
from p2pllm.dht import DhtNode
from p2pllm.errors import LinkError
from p2pllm.execution import ChatTokenizer, Checkpoint, Executor, weight_bytes
from p2pllm.identity import HeldIdentity
from p2pllm.machine import Machine, offer
from p2pllm.peer.commands import Commands
from p2pllm.portrait import MAX_NAME, Portrait
from p2pllm.records import SwarmBody, SwarmKey, swarm_id
from p2pllm.scheduling import ModelSize, PeerId, kv_room
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
)

__all__ = ["Parts"]

log = structlog.get_logger()


class Parts:
    """The parts of one peer, and how frames and facts pass between them."""

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
        self.config = config
        self.own: PeerId = identity.peer_id
        self.certificate = certificate
        self.checkpoint = checkpoint
        swarm = (secret.swarm_id if secret else swarm_id)(checkpoint.fingerprint)
        self._rng = random.Random()

        self.executor = Executor(
            checkpoint,
            dtype=machine.dtype,
            device=machine.device,
            threads=machine.threads,
            quant=machine.quant,
        )
        mine = offer(self.own, config.region, machine, size)
        if not any(mine.capacity):
            log.warning("no_room_for_layers", memory=format_bytes(machine.memory_bytes), do="raise --memory")
        self.allocation = Allocation(
            self.own, checkpoint.layers, mine.capacity, pinned=config.layers, grace_s=config.grace
        )
        self.links = Links(
            identity,
            swarm,
            certificate=certificate,
            secret=secret,
            on_message=self._receive,
            on_down=self._peer_down,
        )
        self.dht = DhtNode(identity, rng=self._rng)
        self._prober = Prober(self.links)
        self.portrait = Portrait(
            config=config,
            machine=machine,
            offer=mine,
            certificate=certificate,
            executor=self.executor,
            allocation=self.allocation,
            links=self.links,
            rho=self._prober.estimates.published,
        )
        name = "".join(letter if letter.isprintable() else "?" for letter in checkpoint.name)[:MAX_NAME]
        self.swarm = Swarm(
            identity=identity,
            swarm=swarm,
            secret=secret,
            dht=self.dht,
            links=self.links,
            model=SwarmBody(name, checkpoint.fingerprint, checkpoint.layers),
            bootstrap=config.bootstrap,
            new_swarm=config.new_swarm,
            prober=self._prober,
            describe=self.portrait.describe,
            measure=self.portrait.measure,
            on_plan=self._on_plan,
            on_news=self._on_news,
            remembered=remembered,
            rng=self._rng,
        )
        self.stages = Stages(
            own=self.own,
            hidden=checkpoint.hidden,
            executor=self.executor,
            send=self.links.send,
            drain=self.links.drain,
            connect=self._connect,
            changed=self._sessions_changed,
            upload=self.links.upload_to,
        )
        self._router = Router(view=self.swarm.view, layers=checkpoint.layers, own=self.own, rng=self._rng)
        self._generator: Generator | None = None
        status = Status(
            model=name,
            size=size,
            parameters=size.layer_bytes / weight_bytes(machine.dtype, machine.quant),
            swarm=self.swarm,
            router=self._router,
            bootstrap=format_addresses(config.bootstrap),
            loading=lambda: self.allocator.loading,
        )
        self.allocator = Allocator(
            allocation=self.allocation,
            executor=self.executor,
            peers=status.peers,
            leaderless_s=lambda: self.swarm.leadership.leaderless_s(time.monotonic()),
            kv_room=partial(kv_room, size, machine.memory_bytes),
            changed=self.swarm.soon,
            hand_over=self.stages.hand_over,
        )
        self.keys = keys
        self.commands = Commands(self.portrait, self.allocation, self._commanded)
        self.api = Api(
            status=status,
            operator=self.commands,
            rng=self._rng,
            keys=keys,
            queue_timeout_s=config.queue_timeout,
            stretch=config.stretch,
            engine=self.executor.stats,
        )

    async def prepare(self) -> None:
        """Read the tokenizer and get ready to load layers. Raises ModelError for a model that cannot be run.

        Both import a lot, which holds up the event loop; so it is over before the swarm counts on this peer.
        """
        tokenizer = await asyncio.to_thread(ChatTokenizer, self.checkpoint)
        await self.executor.prepare()
        network = Network(
            own=self.own,
            send=self.links.send,
            connect=self._connect,
            eos=tokenizer.eos_ids,
            vocabulary=self.checkpoint.vocabulary,
            numerics=self._numerics,
            secret=secrets.token_bytes(SECRET_BYTES),
        )
        self._generator = Generator(
            router=self._router, network=network, context=self.checkpoint.context, rng=self._rng
        )
        self.api.completer = Completer(tokenizer, self._generator)

    async def close(self) -> None:
        """Leave no thread."""
        await self.executor.close()

    async def _connect(self, peer: PeerId) -> None:
        """Bring up the link to a peer of the view."""
        if peer == self.own:
            return
        state = self.swarm.view.peer(peer, time.monotonic())
        if state is None:
            raise LinkError(f"peer {peer[:8]} is not in the view")
        await self.links.ensure(peer, state.body.addresses, state.body.certificate)

    def _numerics(self, peer: PeerId) -> str:
        """How a peer of the view rounds; empty if it is in none."""
        state = self.swarm.view.peer(peer, time.monotonic())
        return "" if state is None else f"{state.body.dtype}/{state.body.quantization}"

    def _receive(self, sender: PeerId, message: Message) -> None:
        match message:
            case Opened() | Failed() | Token(stage=transport.ENTRY_STAGE):
                if self._generator is not None:
                    self._generator.receive(sender, message)
            case Gossip():
                self.swarm.receive(sender, message)
            case Ping() | Pong():
                pass  # the link itself answers these
            case _:
                self.stages.receive(sender, message)

    def _peer_down(self, peer: PeerId) -> None:
        self.stages.peer_down(peer)
        self.swarm.link_down(peer)
        if self._generator is not None:
            self._generator.peer_down(peer)

    def _on_plan(self, plan: SwarmPlan) -> None:
        if self.allocation.follow(plan):
            self.allocator.soon()

    def _on_news(self) -> None:
        self._router.follow()

    def _commanded(self) -> None:
        self.allocator.soon()
        self.swarm.soon()

    def _sessions_changed(self) -> None:
        self.swarm.serving()
        self.swarm.soon()
