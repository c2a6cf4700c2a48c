"""How a peer gets into the network and back, and what it says when it is the wrong one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
from support.bodies import metrics_body, record
from support.waiting import eventually

from p2pllm.config import Address
from p2pllm.dht import Held
from p2pllm.errors import ModelError
from p2pllm.identity import Identity
from p2pllm.records import (
    Body,
    ClaimBody,
    Record,
    SwarmBody,
    SwarmKey,
    directory_key,
    leader_key,
    open_record,
    seal,
    swarm_id,
    swarms_key,
)
from p2pllm.swarm import membership as module
from p2pllm.swarm.membership import Membership

OWN, OTHER = Identity.from_seed(bytes(32)), Identity.from_seed(bytes([1]) * 32)
BOOT, FRIEND, STRANGER = ("192.0.2.1", 7600), ("192.0.2.2", 7600), ("192.0.2.3", 7600)
MODEL = SwarmBody("small", "f" * 16, 30)
SECRET = SwarmKey(b"k" * 16)


class FakeDht:
    """A network in which some addresses answer."""

    def __init__(self) -> None:
        self.alive: set[Address] = set()
        self.asked: list[Address] = []
        self.known: list[Address] = []
        self.held: dict[bytes, list[Held]] = {}
        self.stays = False
        """Whether those who were known stay so when others are asked."""

    async def bootstrap(self, addresses: Sequence[Address]) -> int:
        self.asked += addresses
        before = self.known if self.stays else []
        self.known = [*before, *(address for address in addresses if address in self.alive)]
        return len(self.known)

    def contacts(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(address=address) for address in self.known]

    def good(self) -> list[Address]:
        return self.known

    async def read(self, key: bytes) -> list[Held]:
        return self.held.get(key, [])

    def hold(self, key: bytes, taken: Record) -> None:
        self.held.setdefault(key, []).append(Held(taken, 30.0))

    def index(self, body: SwarmBody, secret: SwarmKey | None = None) -> None:
        swarm = secret.swarm_id(body.fingerprint) if secret else swarm_id(body.fingerprint)
        raw = seal(OTHER, body, swarm=swarm, seq=1, ttl=30.0, secret=secret)
        self.hold(swarms_key(swarm), open_record(raw))


class Memory:
    """What is on the disk."""

    def __init__(self, *peers: Address) -> None:
        self.epoch = self.seq = 0
        self.peers: Sequence[Address] = peers
        self.saved: list[tuple[int, tuple[Address, ...]]] = []

    def save(self) -> None:
        self.saved.append((self.epoch, tuple(self.peers)))


def member(
    dht: FakeDht,
    *bootstrap: Address,
    memory: Memory | None = None,
    secret: SwarmKey | None = None,
    new_swarm: bool = False,
    others: Sequence[Address] = (),
) -> Membership:
    return Membership(
        identity=OWN,
        dht=dht,  # type: ignore[arg-type]
        swarm=secret.swarm_id(MODEL.fingerprint) if secret else swarm_id(MODEL.fingerprint),
        secret=secret,
        model=MODEL,
        bootstrap=bootstrap,
        new_swarm=new_swarm,
        memory=memory or Memory(),
        seq=lambda: 77,
        others=lambda: others,
        rng=random.Random(0),
    )


async def test_the_first_peer_founds_a_network() -> None:
    first = member(FakeDht())
    await first.join()
    assert first.arrived.is_set()


async def test_strangers_that_come_to_a_founder_cannot_end_it() -> None:
    dht = FakeDht()
    dht.index(OTHER_MODEL)
    first = member(dht, memory=Memory(FRIEND))
    await first.join()
    await first.check_model()
    assert first.arrived.is_set()


async def test_who_cannot_reach_anybody_has_not_arrived() -> None:
    dht = FakeDht()
    lost = member(dht, BOOT, memory=Memory(FRIEND))
    await lost.join()
    assert not lost.arrived.is_set()
    assert dht.asked == [BOOT, FRIEND]
    dht.alive = {FRIEND}
    await lost.join()
    assert lost.arrived.is_set(), "remembered peers will do without any bootstrap"


OTHER_MODEL = SwarmBody("large", "e" * 16, 60)


@pytest.mark.parametrize(
    ("indexed", "secret", "message"),
    [
        ([(OTHER_MODEL, None)], None, r"serves large \(eeeeeeee\), not small \(ffffffff\).*--new-swarm"),
        ([(OTHER_MODEL, SECRET)], None, r"private swarms only: pass the --swarm-key-file"),
        ([(OTHER_MODEL, None), (MODEL, SECRET)], None, r"large.*and private swarms, which take --swarm-key"),
        ([(MODEL, None)], SECRET, r"no swarm that serves small .* with this key"),
        ([(MODEL, SwarmKey(b"z" * 16))], SECRET, r"no swarm that serves small .* with this key"),
    ],
)
async def test_a_wrong_model_or_key_founds_no_second_swarm_unnoticed(
    indexed: list[tuple[SwarmBody, SwarmKey | None]], secret: SwarmKey | None, message: str
) -> None:
    dht = FakeDht()
    dht.alive = {BOOT}
    for body, key in indexed:
        dht.index(body, key)
    wrong = member(dht, BOOT, secret=secret)
    with pytest.raises(ModelError, match=message):
        await wrong.join()
    assert not wrong.arrived.is_set()
    meant = member(dht, BOOT, secret=secret, new_swarm=True)
    await meant.join()
    assert meant.arrived.is_set()


def claimed(dht: FakeDht) -> None:
    swarm = swarm_id(MODEL.fingerprint)
    dht.hold(leader_key(swarm), record(OTHER, ClaimBody(1, 0), swarm=swarm))


def listed(dht: FakeDht) -> None:
    swarm = swarm_id(MODEL.fingerprint)
    dht.hold(directory_key(swarm, OWN.node_id, 3), record(OTHER, metrics_body(), swarm=swarm))


def indexed(dht: FakeDht) -> None:
    dht.index(MODEL)


@pytest.mark.parametrize("sign", [claimed, listed, indexed])
async def test_any_sign_of_the_own_swarm_will_do(sign: Callable[[FakeDht], None]) -> None:
    dht = FakeDht()
    dht.alive = {BOOT}
    dht.index(OTHER_MODEL)
    sign(dht)
    right = member(dht, BOOT)
    await right.join()
    assert right.arrived.is_set()
    assert await right.other_models() == ["large"]


async def test_an_entry_counts_only_under_the_swarm_of_its_model() -> None:
    dht = FakeDht()
    dht.alive = {BOOT}
    liar: Body = OTHER_MODEL
    swarm = swarm_id("another fingerprint")
    dht.hold(swarms_key(swarm), record(OTHER, liar, swarm=swarm))
    right = member(dht, BOOT)
    await right.join()
    assert await right.other_models() == []


async def stopped(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_who_loses_everybody_comes_back_through_peers_of_the_view(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RETRY_FIRST_S", 0.01)
    monkeypatch.setattr(module, "SEEK_S", 0.01)
    dht = FakeDht()
    dht.alive = {BOOT}
    peer = member(dht, BOOT, memory=Memory(FRIEND), others=[STRANGER])
    await peer.join()
    task = asyncio.create_task(peer.stay())
    dht.known, dht.alive = [], {STRANGER}
    await eventually(lambda: dht.known == [STRANGER])
    assert dht.asked[:3] == [BOOT, BOOT, FRIEND]
    await stopped(task)


async def test_lost_addresses_are_knocked_at_while_others_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """So two halves of a network that have forgotten each other find each other again."""
    monkeypatch.setattr(module, "SEEK_S", 0.01)
    dht = FakeDht()
    dht.known, dht.alive = [STRANGER], {STRANGER}
    peer = member(dht, BOOT, memory=Memory(STRANGER, FRIEND))
    dht.stays = True
    task = asyncio.create_task(peer.stay())
    await eventually(lambda: {BOOT, FRIEND} <= set(dht.asked))
    assert STRANGER not in dht.asked, "that one is known"
    dht.alive.add(FRIEND)
    await eventually(lambda: FRIEND in dht.known)
    await stopped(task)


async def test_what_is_kept_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_SAVE_S", 0.02)
    dht, memory = FakeDht(), Memory(FRIEND)
    peer = member(dht, memory=memory)
    task = asyncio.create_task(peer.remember())
    peer.epoch(7)
    await eventually(lambda: memory.saved == [(7, (FRIEND,))])  # nobody better is known
    dht.known = [STRANGER]
    peer.epoch(6)
    await eventually(lambda: memory.saved[-1] == (7, (STRANGER, FRIEND)))  # who is silent may come back
    assert memory.seq == 77
    await stopped(task)
