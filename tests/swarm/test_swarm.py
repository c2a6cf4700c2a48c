"""Eight peers in one process, over real sockets: they find each other, hear news, and miss who is gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web
from support.bodies import metrics_body, peer_body

from p2pllm.config import Address
from p2pllm.dht import DhtNode
from p2pllm.errors import ModelError, P2PLLMError, PortTakenError
from p2pllm.identity import Identity, PeerId
from p2pllm.records import MetricsBody, PeerBody, SwarmBody, SwarmKey, seal, swarm_id, swarms_key
from p2pllm.swarm import Prober, Swarm
from p2pllm.swarm import sequence as sequence_module
from p2pllm.transport import LINK_PATH, Gossip, Links, Message, Server, serve

MODEL = SwarmBody("small", "f" * 16, 30)
DEADLINE_S = 20.0
"""Bounds a failure; nothing takes anywhere near as long."""


class Disk:
    """Remembers nothing between runs."""

    epoch = 0
    seq = 0
    peers: tuple[Address, ...] = ()

    def save(self) -> None:
        pass


class Member:
    """A peer without a model."""

    def __init__(self, identity: Identity, bootstrap: tuple[Address, ...], secret: SwarmKey | None) -> None:
        self.id = identity.peer_id
        self.running = 0
        self._identity = identity
        self._swarm_id = secret.swarm_id(MODEL.fingerprint) if secret else swarm_id(MODEL.fingerprint)
        self.links = Links(
            identity,
            self._swarm_id,
            certificate=None,
            secret=secret,
            on_message=self._receive,
            on_down=self._link_down,
        )
        self.dht = DhtNode(identity)
        self.swarm = Swarm(
            identity=identity,
            swarm=self._swarm_id,
            secret=secret,
            dht=self.dht,
            links=self.links,
            model=MODEL,
            bootstrap=bootstrap,
            new_swarm=False,
            prober=Prober(self.links),
            describe=self._describe,
            measure=self._measure,
            on_plan=lambda plan: None,
            remembered=Disk(),
        )
        self.server: Server
        self.task: asyncio.Task[None]

    @property
    def address(self) -> Address:
        return "127.0.0.1", self.server.port

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get(LINK_PATH, self.links.accept)
        while True:
            self.server = await serve(app, ["127.0.0.1"], 0)
            try:
                await self.dht.start(["127.0.0.1"], self.server.port)
                break
            except PortTakenError:  # a free TCP port whose UDP twin is not
                await self.server.close()
        self.task = asyncio.create_task(self.swarm.run())

    async def stop(self, *, goodbye: bool = False) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])
        if goodbye:
            await self.swarm.goodbye()
        await self.links.close()
        await self.server.close()
        await self.dht.close()

    def sees(self) -> set[PeerId]:
        return {state.peer for state in self.swarm.view.peers(time.monotonic())}

    def hears_of(self, peer: PeerId) -> int:
        """How many sessions that peer is known to run."""
        state = self.swarm.view.peer(peer, time.monotonic())
        return state.metrics.running if state is not None and state.metrics is not None else -1

    def _describe(self) -> PeerBody:
        return peer_body(addresses=(self.address,), certificate=b"")

    def _measure(self) -> MetricsBody:
        return metrics_body(running=self.running)

    def _link_down(self, peer: PeerId) -> None:
        self.swarm.link_down(peer)

    def _receive(self, sender: PeerId, message: Message) -> None:
        if isinstance(message, Gossip):
            self.swarm.receive(sender, message)


Start = Callable[..., Awaitable[Member]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    members: list[Member] = []

    async def start_member(
        *bootstrap: Address, secret: SwarmKey | None = None, identity: Identity | None = None
    ) -> Member:
        member = Member(identity or Identity.generate(), bootstrap, secret)
        await member.start()
        members.append(member)
        return member

    before = asyncio.all_tasks()
    yield start_member
    await asyncio.gather(*(member.stop() for member in members))
    await asyncio.sleep(0)
    assert asyncio.all_tasks() <= before | {asyncio.current_task()}, "shutdown leaves no task"


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def test_eight_peers_from_joining_to_leaving(start: Start) -> None:
    first = await start()
    await eventually(lambda: first.swarm.leadership.leads(time.monotonic()))
    members = [first, *await asyncio.gather(*(start(first.address) for _ in range(7)))]
    everyone = {member.id for member in members}
    await eventually(lambda: all(member.sees() == everyone for member in members))
    await eventually(lambda: all(m.swarm.leadership.leader == first.id for m in members))

    *members, leaver, dead = members
    await dead.stop()
    silent = time.monotonic()

    members[3].running = 7
    members[3].swarm.soon()
    await eventually(lambda: all(member.hears_of(members[3].id) == 7 for member in members))

    await leaver.stop(goodbye=True)
    said = time.monotonic()
    await eventually(lambda: all(leaver.id not in member.sees() for member in members))
    assert time.monotonic() - said < 4, "long before its records run out"

    await eventually(lambda: all(dead.id not in member.sees() for member in members))
    assert time.monotonic() - silent < 6.5
    assert all(member.sees() == {other.id for other in members} for member in members)


async def test_outsiders_cannot_see_a_private_swarm(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = SwarmKey(b"a secret of friends")
    first = await start(secret=secret)
    holders: dict[bytes, int] = {}
    put = first.dht.put

    async def counted(key: bytes, raw: bytes) -> int:
        holders[key] = await put(key, raw)
        return holders[key]

    monkeypatch.setattr(first.dht, "put", counted)
    second = await start(first.address, secret=secret)
    await eventually(lambda: first.sees() == second.sees() == {first.id, second.id})
    await eventually(lambda: first.swarm.leadership.leads(time.monotonic()))

    await eventually(lambda: holders.get(swarms_key(first.swarm.id), 0) >= 2)

    outsider = await start(first.address)
    await asyncio.wait([outsider.task], timeout=DEADLINE_S)
    error = outsider.task.exception()
    if isinstance(error, ExceptionGroup):  # noticed only at the second look
        (error,) = error.exceptions
    assert isinstance(error, ModelError)
    assert "--swarm-key-file" in str(error)
    assert outsider.sees() == set()
    assert outsider.id not in first.sees()


async def test_a_cloned_identity_ends_the_peer(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_module, "SETTLE_S", 0.0)
    identity = Identity.generate()
    first = await start()
    victim = await start(first.address, identity=identity)
    await eventually(lambda: first.sees() == {first.id, victim.id})
    clone = seal(identity, metrics_body(), swarm=first.swarm.id, seq=2**62, ttl=5.0)
    victim.swarm.receive(first.id, Gossip((clone,)))
    await asyncio.wait([victim.task], timeout=DEADLINE_S)
    with pytest.raises(ExceptionGroup) as raised:
        victim.task.result()
    assert raised.group_contains(P2PLLMError, match="copied")
