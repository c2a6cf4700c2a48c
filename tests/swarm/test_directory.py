"""How the directory is cut, and what of it is read how often."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.bodies import SWARM, metrics_body, record
from support.waiting import eventually

from p2pllm.dht import Digest, Held
from p2pllm.identity import Identity
from p2pllm.records import (
    MAX_DIRECTORY_BITS,
    PlanBody,
    directory_key,
    directory_keys,
    leader_key,
    plan_key,
)
from p2pllm.swarm import directory as module
from p2pllm.swarm.directory import Directory
from p2pllm.swarm.widths import OVERLAP_S, Widths, bits_for

OWN, OTHER = Identity.from_seed(bytes(32)), Identity.from_seed(bytes([1]) * 32)


@pytest.mark.parametrize(
    ("peers", "bits", "expected"),
    [
        (1, 0, 0),
        (24, 0, 0),
        (25, 0, 1),
        (64, 0, 2),
        (256, 0, 4),
        (4096, 0, 8),
        (100_000, 0, MAX_DIRECTORY_BITS),
        (16, 1, 1),  # 8 a shard: enough to leave it so
        (15, 1, 0),
        (0, 8, 0),
    ],
)
def test_shards_have_some_sixteen_peers(peers: int, bits: int, expected: int) -> None:
    assert bits_for(peers, bits) == expected


@given(st.integers(0, 6000), st.integers(0, MAX_DIRECTORY_BITS))
def test_the_width_is_stable_once_chosen(peers: int, bits: int) -> None:
    chosen = bits_for(peers, bits)
    assert bits_for(peers, chosen) == chosen
    assert chosen == MAX_DIRECTORY_BITS or peers / 2**chosen <= 24
    assert chosen == 0 or peers / 2**chosen >= 8


def test_old_shards_are_used_for_a_while_beside_new_ones() -> None:
    widths = Widths()
    assert widths.current(0.0) == (0,)
    widths.follow(2, 1.0)
    widths.follow(2, 5.0)
    assert widths.current(OVERLAP_S) == (2, 0)
    widths.follow(3, 6.0)
    assert widths.current(6.0) == (3, 0, 2)
    assert widths.current(1.0 + OVERLAP_S) == (3, 2)
    widths.follow(2, 12.0)
    assert widths.current(12.0) == (2, 3)
    assert widths.current(12.0 + OVERLAP_S) == (2,)


class FakeDht:
    """Keys with what they hold, and a count of what was asked."""

    def __init__(self) -> None:
        self.held: dict[bytes, list[Held]] = {}
        self.reads: Counter[bytes] = Counter()
        self.glances: Counter[bytes] = Counter()

    async def read(self, key: bytes) -> list[Held]:
        self.reads[key] += 1
        return self.held.get(key, [])

    async def glance(self, key: bytes) -> list[Digest]:
        self.glances[key] += 1
        return [Digest(r.peer_id, r.kind, r.seq, life) for r, life in self.held.get(key, [])]


class Host:
    """A directory, and what it tells."""

    def __init__(self) -> None:
        self.dht, self.widths = FakeDht(), Widths()
        self.heard: list[Held] = []
        self.hints: list[Digest] = []
        self.wants_record = False
        self.alone = False
        self.directory = Directory(
            identity=OWN,
            swarm=SWARM,
            secret=None,
            dht=self.dht,  # type: ignore[arg-type]
            widths=self.widths,
            hear=self.heard.extend,
            hint=self._hint,
            alone=lambda: self.alone,
            leader=lambda: OTHER.peer_id,
            rng=random.Random(1),
        )

    def _hint(self, digests: list[Digest]) -> bool:
        self.hints.extend(digests)
        return self.wants_record and bool(digests)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    """With periods a fiftieth as long as they are."""
    for period in ("READ_S", "GLANCE_S", "FULL_S", "LEADER_S", "PLAN_S", "ALONE_S", "SERVING_S"):
        monkeypatch.setattr(module, period, getattr(module, period) / 50)
    return Host()


async def run(host: Host, condition: Callable[[], bool]) -> None:
    task = asyncio.create_task(host.directory.run())
    await eventually(lambda: condition() or task.done())
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_a_newcomer_reads_everything_once(host: Host) -> None:
    host.widths.follow(2, 0.0)
    (key, *_) = directory_keys(SWARM, 2)
    host.dht.held[key] = [Held(record(OTHER, metrics_body()), 4.0)]
    await host.directory.read_all()
    assert [held.life for held in host.heard] == [4.0]
    assert set(host.dht.reads) == {leader_key(SWARM), *directory_keys(SWARM, 2)}
    assert set(host.dht.reads.values()) == {1}


async def test_idle_peers_glance_and_read_now_and_then(host: Host) -> None:
    await host.directory.read_all()
    (key,) = directory_keys(SWARM, 0)
    host.dht.held[key] = [Held(record(OTHER, metrics_body()), 4.0)]
    await run(host, lambda: host.dht.reads[key] == 4)
    assert host.dht.glances[key] > 2 * host.dht.reads[key]
    assert host.hints[0] == Digest(OTHER.peer_id, "metrics", 1, 4.0)
    assert host.dht.reads[leader_key(SWARM)] > host.dht.reads[key]


async def test_a_digest_that_means_something_new_has_the_records_read(host: Host) -> None:
    await host.directory.read_all()
    (key,) = directory_keys(SWARM, 0)
    host.dht.held[key] = [Held(record(OTHER, metrics_body()), 4.0)]
    host.wants_record = True
    await run(host, lambda: bool(host.heard))
    assert host.dht.glances[key] == 1


async def test_who_serves_reads_at_once_and_does_not_glance(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SERVING_S", 60.0)
    monkeypatch.setattr(module, "GLANCE_S", 60.0)
    await host.directory.read_all()
    keys = directory_keys(SWARM, 3)
    host.widths.follow(3, -OVERLAP_S)
    host.widths.current(1e9)
    task = asyncio.create_task(host.directory.run())
    await eventually(lambda: sum(host.dht.glances.values()) == 1)  # the next would be long in coming
    host.directory.serving()
    await eventually(lambda: all(host.dht.reads[key] >= 3 for key in keys))
    assert sum(host.dht.glances.values()) == 1
    task.cancel()
    await asyncio.wait([task])


async def test_nobody_else_can_have_all_parts_of_a_plan_read(host: Host) -> None:
    body = PlanBody(1, 1, 0, 256, 0, 0, 0.0, False, ())
    stranger = Identity.from_seed(bytes([2]) * 32)
    host.dht.held[plan_key(SWARM, 0)] = [Held(record(stranger, body), 30.0)]
    await run(host, lambda: host.dht.reads[plan_key(SWARM, 0)] > 2)
    assert host.dht.reads[plan_key(SWARM, 1)] == 0


async def test_a_plan_is_read_part_by_part(host: Host) -> None:
    def part(number: int) -> Held:
        return Held(record(OTHER, PlanBody(1, 1, number, 3, 0, 0, 0.0, False, ())), 30.0)

    for number in range(3):
        host.dht.held[plan_key(SWARM, number)] = [part(number)]
    await run(host, lambda: host.dht.reads[plan_key(SWARM, 2)] > 0)
    assert {held.record.body().part for held in host.heard} == {0, 1, 2}  # type: ignore[union-attr]


async def test_one_who_is_alone_finds_others_however_the_directory_is_cut(host: Host) -> None:
    host.alone = True
    mine = directory_key(SWARM, OWN.node_id, 4)
    host.dht.held[mine] = [Held(record(OWN, metrics_body()), 4.0)]
    await run(host, lambda: host.dht.reads[directory_key(SWARM, OWN.node_id, 5)] > 0)
    assert host.widths.bits == 0, "its own records tell nothing"
    host.dht.held[mine].append(Held(record(OTHER, metrics_body()), 4.0))
    await run(host, lambda: host.widths.bits == 4)
    assert set(host.directory.own_keys()) >= {mine}


async def test_large_swarms_are_read_more_slowly(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEYS_A_ROUND", 2)
    monkeypatch.setattr(module, "SERVING_S", 60.0)
    await host.directory.read_all()
    host.directory.serving()

    async def rounds(bits: int) -> float:
        host.widths.follow(bits, -OVERLAP_S)
        host.dht.reads.clear()
        last = directory_keys(SWARM, bits)[-1]
        began = asyncio.get_running_loop().time()
        await run(host, lambda: host.dht.reads[last] >= 3)
        return asyncio.get_running_loop().time() - began

    assert await rounds(4) > 2 * await rounds(1)
