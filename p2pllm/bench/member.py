"""A peer without a model, on loopback: everything below `serving`, with layers that take no memory."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from p2pllm import __version__
from p2pllm.bench.wires import WiredLinks, Wires
from p2pllm.config import Address
from p2pllm.dht import DhtNode
from p2pllm.identity import Identity, PeerId
from p2pllm.ports import take_link_port
from p2pllm.records import MetricsBody, PeerBody, SwarmBody, swarm_id
from p2pllm.scheduling import Capacity
from p2pllm.swarm import Allocation, Drop, Load, PeerState, Prober, Swarm, SwarmPlan
from p2pllm.transport import Certificate, Gossip, Message, Server

__all__ = ["LAYERS", "Member", "Memory"]

HOST: Final = "127.0.0.1"
LAYERS: Final = 32
MODEL: Final = SwarmBody("nothing", "nothing", LAYERS)

LOAD_S: Final = 0.05
"""How long a member takes to load layers, and to drop them."""

STEP_S: Final = 0.25
KV_BLOCKS: Final = 4096
LAYER_S: Final = 1e-3
HEAD_S: Final = 2e-3
GOODBYE_S: Final = 1.0


@dataclass(slots=True)
class Memory:
    """What a member would keep on disk."""

    epoch: int = 0
    seq: int = 0
    peers: Sequence[Address] = ()

    def save(self) -> None:
        """It is not kept."""


class Member:
    """One peer of the swarm. ``running`` is how many sessions it says to have.

    ``on_news`` is called when there may be something new in its view, ``puts`` are the seconds that records
    took to get to their replicas.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        bootstrap: Sequence[Address] = (),
        certificate: Certificate | None = None,
        room: int = LAYERS,
        memory: Memory | None = None,
        rng: random.Random,
    ) -> None:
        """Without a ``certificate`` links are not encrypted; ``room`` is how many layers it can hold."""
        self.id = identity.peer_id
        self.wires = Wires()
        self.memory = memory or Memory()
        self.running = 0
        self.on_news: Callable[[], None] = lambda: None
        self._certificate = certificate
        self._capacity = Capacity.same(room)
        self._server: Server | None = None
        self._tasks: asyncio.Task[None] | None = None
        self.allocation = Allocation(self.id, LAYERS, self._capacity)
        swarm = swarm_id(MODEL.fingerprint)
        self._links = WiredLinks(
            identity,
            swarm,
            wires=self.wires,
            certificate=certificate,
            on_message=self._receive,
            on_down=self._link_down,
        )
        self._dht = _TimedNode(identity, rng=rng, wrap=self.wires.wrap)
        self._prober = Prober(self._links)
        self.swarm = Swarm(
            identity=identity,
            swarm=swarm,
            secret=None,
            dht=self._dht,
            links=self._links,
            model=MODEL,
            bootstrap=bootstrap,
            new_swarm=False,
            prober=self._prober,
            describe=self.describe,
            measure=self.measure,
            on_plan=self.on_plan,
            on_news=self._news,
            remembered=self.memory,
            rng=rng,
        )

    @property
    def address(self) -> Address:
        """Where it listens, both TCP and UDP."""
        return HOST, self._dht.port

    @property
    def puts(self) -> list[float]:
        """Seconds that each put took so far."""
        return self._dht.puts

    async def start(self) -> None:
        """Listen on a free port and take part."""
        tls = None if self._certificate is None else self._certificate.server_context()
        self._server = await take_link_port(self._links, self._dht, [HOST], 0, tls)
        self._tasks = asyncio.create_task(self._run())

    async def stop(self, *, goodbye: bool = False) -> None:
        """Be gone, without a word to the swarm unless ``goodbye``. Raises what had stopped it before."""
        tasks, self._tasks = self._tasks, None
        if tasks is None:
            return
        tasks.cancel()
        await asyncio.wait([tasks])
        if goodbye:
            with suppress(TimeoutError):
                async with asyncio.timeout(GOODBYE_S):
                    await self.swarm.goodbye()
        await self._dht.close()
        await self._links.close()
        if self._server is not None:
            await self._server.close()
        if not tasks.cancelled():
            tasks.result()

    def states(self) -> dict[PeerId, PeerState]:
        """The peers that it sees in the swarm."""
        return {state.peer: state for state in self.swarm.view.peers(time.monotonic())}

    def describe(self) -> PeerBody:
        """What a peer says of itself that changes slowly."""
        return PeerBody(
            addresses=(self.address,),
            region="here",
            hardware="none",
            certificate=b"" if self._certificate is None else self._certificate.fingerprint,
            memory_bytes=2**33,
            flops=1e12,
            bandwidth=1e11,
            capacity=self._capacity,
            kv_bytes=2**31,
            layer_s=LAYER_S,
            head_s=HEAD_S,
            dtype="float32",
            quantization="none",
            software=__version__,
            leaving=False,
            paused=False,
            pinned=False,
            replans=0,
            force=False,
        )

    def measure(self) -> MetricsBody:
        """What a peer says of itself that changes with its load."""
        return MetricsBody(
            spans=self.allocation.spans(),
            generation=self.allocation.generation,
            layer_s=LAYER_S,
            head_s=HEAD_S,
            wait_s=0.0,
            running=self.running,
            waiting=0,
            free_kv_blocks=KV_BLOCKS,
            cached_kv_blocks=0,
            memory_used=2**32,
            upload=0.0,
            rho=self._prober.estimates.published(),
        )

    def on_plan(self, plan: SwarmPlan) -> None:
        """Take the plan that counts now."""
        self.allocation.follow(plan)

    def _news(self) -> None:
        self.on_news()

    def _link_down(self, peer: PeerId) -> None:
        self.swarm.link_down(peer)

    def _receive(self, sender: PeerId, message: Message) -> None:
        if isinstance(message, Gossip):
            self.swarm.receive(sender, message)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.swarm.run())
            tasks.create_task(self._allocate())

    async def _allocate(self) -> None:
        """Hold what the plan says."""
        while True:
            now = time.monotonic()
            states = self.swarm.view.peers(now)
            leaderless_s = self.swarm.leadership.leaderless_s(now)
            for action in self.allocation.step(now, states, lambda *_: 0, leaderless_s):
                self.swarm.soon()
                await asyncio.sleep(LOAD_S)
                self._done(action)
                self.swarm.soon()
            await asyncio.sleep(STEP_S)

    def _done(self, action: Load | Drop) -> None:
        if isinstance(action, Load):
            self.allocation.loaded(action.slice)
        else:
            self.allocation.dropped(action.slice)


class _TimedNode(DhtNode):
    """Knows how long its puts took, in seconds."""

    def __init__(self, *arguments: object, **others: object) -> None:
        super().__init__(*arguments, **others)  # type: ignore[arg-type]
        self.puts: list[float] = []

    async def put(self, key: bytes, raw: bytes) -> int:
        """Put a record under a key; how many nodes hold it."""
        began = time.monotonic()
        held = await super().put(key, raw)
        self.puts.append(time.monotonic() - began)
        return held
