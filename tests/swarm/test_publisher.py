"""What is published when, under which numbers, and what a foreign number means."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bodies import SWARM, metrics_body, peer_body, record
from support.waiting import eventually

from p2pllm.errors import P2PLLMError
from p2pllm.identity import Identity
from p2pllm.records import ClaimBody, Record, Span, leader_key, open_record
from p2pllm.swarm import publisher as module
from p2pllm.swarm.publisher import Publisher, has_changed
from p2pllm.swarm.sequence import SETTLE_S, Sequence

OWN = Identity.from_seed(bytes(32))
KEY, OTHER_KEY = b"k" * 20, b"o" * 20


def test_numbers_grow_with_the_clock_and_never_shrink() -> None:
    numbers = Sequence(OWN.peer_id, 0.0)
    assert [numbers.next(wall) for wall in (1000, 1000, 2000, 5, 5)] == [1000, 1001, 2000, 2001, 2002]


def test_numbers_jump_above_those_of_an_earlier_run() -> None:
    numbers = Sequence(OWN.peer_id, 100.0)
    assert numbers.next(1000) == 1000
    numbers.seen(1000, 200.0)  # our own
    numbers.seen(5000, 99.0)  # the clock was set back between the runs
    numbers.seen(4000, 100.0 + SETTLE_S)  # another one of the same run, heard a little late
    assert numbers.next(1001) == 5001


def test_a_number_that_somebody_else_sealed_is_a_cloned_identity() -> None:
    numbers = Sequence(OWN.peer_id, 100.0)
    numbers.next(1000)
    with pytest.raises(P2PLLMError, match=r"copied.*--data-dir") as raised:
        numbers.seen(1001, 100.1 + SETTLE_S)
    assert raised.value.exit_code == 1


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 10_000)), max_size=30))
@settings(max_examples=100, deadline=None)
def test_numbers_are_above_all_that_was_sealed_or_seen(steps: list[tuple[int, int]]) -> None:
    numbers, highest = Sequence(OWN.peer_id, 0.0), 0
    for wall, seen in steps:
        numbers.seen(seen, 0.0)
        sealed = numbers.next(wall)
        assert sealed > max(highest, seen) or sealed == wall > highest
        highest = sealed


@pytest.mark.parametrize(
    ("before", "now", "is_event"),
    [
        ({}, {}, False),
        ({"layer_s": 0.010}, {"layer_s": 0.0105}, False),
        ({"layer_s": 0.010}, {"layer_s": 0.0115}, True),
        ({"wait_s": 0.0}, {"wait_s": 0.0009}, False),
        ({"wait_s": 0.0}, {"wait_s": 0.02}, True),
        ({"free_kv_blocks": 100}, {"free_kv_blocks": 91}, False),
        ({"free_kv_blocks": 100}, {"free_kv_blocks": 89}, True),
        ({"running": 0}, {"running": 1}, True),
        ({"waiting": 20}, {"waiting": 21}, False),
        ({}, {"spans": (Span(0, 10, "draining"),)}, True),
        ({}, {"generation": 1}, True),
        ({}, {"memory_used": 2**30, "rho": (("ab" * 8, 1.0),)}, False),
    ],
)
def test_a_tenth_of_the_load_is_worth_telling(
    before: dict[str, Any], now: dict[str, Any], is_event: bool
) -> None:
    assert has_changed(metrics_body(**before), metrics_body(**now)) is is_event
    assert has_changed(metrics_body(**now), metrics_body(**before)) is is_event


class FakeDht:
    """Keeps what is put; a put takes as long as a test likes."""

    def __init__(self) -> None:
        self.puts: list[tuple[bytes, Record]] = []
        self.go = asyncio.Event()
        self.go.set()

    def open(self, raw: bytes) -> Record:
        return open_record(raw)

    async def put(self, key: bytes, raw: bytes) -> int:
        await self.go.wait()
        self.puts.append((key, open_record(raw)))
        return 8


class Host:
    """A publisher with what it publishes, run on a clock of tenths of the real periods."""

    def __init__(self) -> None:
        self.dht = FakeDht()
        self.keys = [KEY]
        self.kept: list[Record] = []
        self.flooded: list[Record] = []
        self.body, self.metrics = peer_body(), metrics_body()
        self.publisher = Publisher(
            identity=OWN,
            swarm=SWARM,
            secret=None,
            dht=self.dht,  # type: ignore[arg-type]
            keys=lambda: self.keys,
            describe=lambda: self.body,
            measure=lambda: self.metrics,
            keep=self.kept.append,
            flood=lambda raw: self.flooded.append(open_record(raw)),
            rng=random.Random(1),
        )

    def kinds(self, records: list[Record]) -> list[str]:
        return [taken.kind for taken in records]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setattr(module, "METRICS_PERIOD_S", 0.15)
    monkeypatch.setattr(module, "COALESCE_S", 0.03)
    monkeypatch.setattr(module, "CHECK_S", 0.05)
    return Host()


async def stopped(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_the_description_once_and_the_metrics_again_and_again(host: Host) -> None:
    task = asyncio.create_task(host.publisher.run())
    await eventually(lambda: host.kinds(host.kept).count("metrics") == 6)
    kinds = host.kinds(host.kept)
    assert kinds[:2] == ["peer", "metrics"]
    assert 2 <= kinds.count("peer") <= 4, "after one period, two and four more: less and less often"
    assert host.kinds(host.flooded) == ["peer"], "what is only due goes to the directory alone"
    assert [taken.seq for taken in host.kept] == sorted({taken.seq for taken in host.kept})
    assert {key for key, _ in host.dht.puts} == {KEY}
    host.body = peer_body(region="us")
    await eventually(lambda: host.kinds(host.flooded) == ["peer", "peer"])
    assert [open_record(raw).kind for raw in host.publisher.introduction()] == ["peer", "metrics"]
    await stopped(task)


async def test_an_event_goes_to_all_and_a_change_of_load_is_one(host: Host) -> None:
    task = asyncio.create_task(host.publisher.run())
    await eventually(lambda: len(host.kept) == 2)
    host.publisher.soon()
    await eventually(lambda: host.kinds(host.flooded).count("metrics") == 1)
    host.metrics = metrics_body(running=3)
    await eventually(lambda: host.kinds(host.flooded).count("metrics") == 2)
    assert host.flooded[-1].body() == host.kept[-1].body()
    await stopped(task)


async def test_events_close_together_share_a_record(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COALESCE_S", 0.3)
    monkeypatch.setattr(module, "METRICS_PERIOD_S", 60.0)
    task = asyncio.create_task(host.publisher.run())
    await eventually(lambda: len(host.kept) == 2)
    for _ in range(20):
        host.publisher.soon()
        await asyncio.sleep(0.001)
    await eventually(lambda: len(host.kept) == 3)
    await asyncio.sleep(0.05)
    assert len(host.kept) == 3
    await stopped(task)


async def test_a_slow_network_holds_up_no_event_and_gets_the_newest(host: Host) -> None:
    host.dht.go.clear()
    task = asyncio.create_task(host.publisher.run())
    for count in range(1, 4):
        host.publisher.soon()
        await eventually(lambda count=count: host.kinds(host.flooded).count("metrics") >= count)
    assert host.dht.puts == []
    newest = host.kept[-1].seq
    host.dht.go.set()
    await eventually(lambda: any(taken.seq >= newest for _, taken in host.dht.puts))
    put = [taken for _, taken in host.dht.puts if taken.kind == "metrics"]
    assert put[0].seq < newest
    assert len(put) < host.kinds(host.kept).count("metrics"), "those between were out of date"
    await stopped(task)


async def test_a_directory_that_is_cut_otherwise_gets_everything_again(host: Host) -> None:
    task = asyncio.create_task(host.publisher.run())
    await eventually(lambda: len(host.dht.puts) >= 2)
    host.keys = [OTHER_KEY, KEY]
    host.publisher.again()
    await eventually(lambda: "peer" in [taken.kind for key, taken in host.dht.puts if key == OTHER_KEY])
    assert host.kinds(host.flooded) == ["peer"]
    await stopped(task)


async def test_goodbye_is_flooded_and_put(host: Host) -> None:
    raws = host.publisher.goodbye()
    await host.publisher.put(*raws)
    body, metrics = (taken.body() for taken in host.flooded)
    assert (body.leaving, metrics.spans) == (True, ())  # type: ignore[union-attr]
    assert host.kinds([taken for _, taken in host.dht.puts]) == ["peer", "metrics"]


async def test_claims_have_numbers_of_the_same_row(host: Host) -> None:
    assert await host.publisher.publish(ClaimBody(3, 0), leader_key(SWARM), 3.0) == 8
    await host.publisher.publish(ClaimBody(3, 1), leader_key(SWARM), 3.0, flood=True)
    assert host.publisher.introduction() == []
    first, second = (taken for _, taken in host.dht.puts)
    assert (first.ttl, second.seq > first.seq) == (3.0, True)
    assert [taken.body() for taken in host.flooded] == [ClaimBody(3, 1)]
    host.publisher.seen(second, second.ttl)


def test_a_copy_that_is_as_old_as_this_run_is_no_clone() -> None:
    host, later = Host(), record(OWN, metrics_body(), seq=2**60, ttl=30.0)
    host.publisher.seen(later, 30.0)
    host.publisher.goodbye()
    assert host.kept[0].seq == 2**60 + 1
