"""Links between well-behaved peers: how they come up, what order holds on them, and how they end."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import replace

import aiohttp
import psutil
import pytest

from p2pllm.errors import FrameError, LinkError
from p2pllm.identity import Identity
from p2pllm.transport import Hidden, Limits, Renew, encode

DEADLINE_S = 20.0


async def pair(start):
    one, other = await start(), await start()
    await one.dial(other)
    return one, other


def numbered(count):
    return [Renew(f"s{number}") for number in range(count)]


@pytest.fixture
async def mute():
    """Address of a server that accepts connections and says nothing."""

    async def listen(reader, writer):
        await reader.read()
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[:2]
    server.close()


@pytest.fixture
def dead():
    """Address that refuses connections."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield unused.getsockname()[:2]


async def test_messages_arrive_in_order_both_ways_over_one_dial(start):
    one, other = await pair(start)
    for here, there in ((one, other), (other, one)):
        for message in numbered(200):
            here.links.send(there.id, message)
        await there.until(lambda there=there: len(there.received) == 200)
        assert there.received == [(here.id, message) for message in numbered(200)]
    assert (one.accepted, other.accepted) == (0, 1)


async def test_a_large_tensor_arrives_whole(start):
    one, other = await pair(start)
    data = bytes(range(256)) * (64 * 1024)
    message = Hidden("s", 1, 0, 0, True, "bfloat16", (1024, 8192), data)
    one.links.send(other.id, message)
    await other.until(lambda: len(other.received) == 1)
    assert other.received == [(one.id, message)]


async def test_a_message_to_oneself_arrives_after_the_sender_is_done(start):
    one = await start()
    for message in numbered(3):
        one.links.send(one.id, message)
    assert one.received == []
    await one.until(lambda: len(one.received) == 3)
    assert one.received == [(one.id, message) for message in numbered(3)]
    assert await one.links.ping(one.id) == 0.0
    await one.links.ensure(one.id, [], one.fingerprint)
    assert one.links.peers() == set()


async def test_callers_at_the_same_time_share_a_dial(start):
    one, other = await start(), await start()
    await asyncio.gather(*(one.dial(other) for _ in range(10)))
    await one.links.ensure(other.id, [], other.fingerprint)
    assert other.accepted == 1
    assert one.links.peers() == {other.id}


async def test_a_cancelled_caller_does_not_take_the_shared_dial_with_it(start):
    one, other = await start(), await start()
    impatient = asyncio.create_task(one.dial(other))
    patient = asyncio.create_task(one.dial(other))
    await asyncio.sleep(0)
    impatient.cancel()
    await patient
    assert one.links.peers() == {other.id}


async def test_addresses_are_tried_in_order(start, dead, mute):
    one, other = await start(), await start()
    await one.links.ensure(other.id, [dead, mute, other.address], other.fingerprint, timeout=1.0)
    assert one.links.peers() == {other.id}


async def test_no_address_that_works(start, dead, mute):
    one, other = await start(), await start()
    reasons = rf".*:{dead[1]}: Connection refused; .*:{mute[1]}: does not answer"
    with pytest.raises(LinkError, match=f"cannot reach peer {other.id[:8]}: {reasons}"):
        await one.links.ensure(other.id, [dead, mute], other.fingerprint, timeout=0.2)
    with pytest.raises(LinkError, match="no address"):
        await one.links.ensure(other.id, [], other.fingerprint)
    with pytest.raises(LinkError, match="70000"):
        await one.links.ensure(other.id, [("127.0.0.1", 70000)], other.fingerprint)


async def test_a_peer_that_dials_us_ends_our_own_vain_dial(start, mute):
    one, other = await start(), await start()
    waiting = asyncio.create_task(
        one.links.ensure(other.id, [mute], other.fingerprint, timeout=10 * DEADLINE_S)
    )
    await asyncio.sleep(0)
    await other.dial(one)
    async with asyncio.timeout(DEADLINE_S):
        await waiting
    assert one.links.peers() == {other.id}


@pytest.mark.parametrize("attempt", range(5))
async def test_peers_that_dial_each_other_keep_order_and_one_link(start, attempt):
    one, other = await start(), await start()
    await asyncio.gather(one.dial(other), other.dial(one))
    for message in numbered(100):
        one.links.send(other.id, message)
        other.links.send(one.id, message)
    await one.until(lambda: len(one.received) == 100)
    await other.until(lambda: len(other.received) == 100)
    assert other.received == [(one.id, message) for message in numbered(100)]
    assert one.received == [(other.id, message) for message in numbered(100)]
    await one.links.close()
    await other.until(lambda: bool(other.downs))
    assert (one.downs, other.downs) == ([], [one.id])
    assert other.links.peers() == set()


async def test_who_is_not_the_peer_we_want(start):
    one, other, stranger = await start(), await start(), Identity.generate()
    with pytest.raises(LinkError, match=f"belongs to peer {other.id[:8]}, not {stranger.peer_id[:8]}"):
        await one.links.ensure(stranger.peer_id, [other.address], other.fingerprint)
    assert one.links.peers() == other.links.peers() == set()


async def test_who_serves_another_model(start):
    one, other = await start(), await start(swarm=bytes(20))
    with pytest.raises(LinkError, match=f"{other.id[:8]} serves another model"):
        await one.dial(other)
    assert one.links.peers() == other.links.peers() == set()


async def test_a_cloned_identity_does_not_link_with_its_twin(start):
    one = await start()
    twin, other = await start(identity=one.identity), Identity.generate()
    with pytest.raises(LinkError, match="dialled itself"):
        await one.links.ensure(other.peer_id, [twin.address], twin.fingerprint)


async def test_ping_measures_a_round_trip(start):
    one, other = await pair(start)
    started = time.perf_counter()
    seconds = await one.links.ping(other.id)
    assert 0.0 < seconds <= time.perf_counter() - started
    assert other.received == []
    with pytest.raises(LinkError, match="no link"):
        await one.links.ping(Identity.generate().peer_id)


async def test_sending_without_a_link(start):
    one, other = await start(), await start()
    with pytest.raises(LinkError, match=f"no link to peer {other.id[:8]}"):
        one.links.send(other.id, Renew("s"))


async def test_a_message_over_the_limit_costs_nothing_but_itself(start):
    one, other = await start(limits=Limits(frame=10_000)), await start()
    await one.dial(other)
    with pytest.raises(FrameError, match="smaller chunks"):
        one.links.send(other.id, Hidden("s", 1, 0, 0, True, "float32", (4, 1024), bytes(4 * 4096)))
    one.links.send(other.id, Renew("s"))
    await other.until(lambda: bool(other.received))
    assert other.received == [(one.id, Renew("s"))]


async def test_a_frame_of_exactly_the_limit_passes(start):
    message = Hidden("s", 1, 0, 0, True, "float16", (500, 10), bytes(10_000))
    limits = Limits(frame=len(encode(message)))
    one, other = await start(limits=limits), await start(limits=limits)
    await one.dial(other)
    one.links.send(other.id, message)
    await other.until(lambda: bool(other.received))
    assert other.received == [(one.id, message)]


async def test_close_delivers_what_was_queued_and_tells_the_other_side(start):
    one, other = await pair(start)
    size = 4 * 1024**2
    message = Hidden("s", 1, 0, 0, True, "float32", (size // 4,), bytes(size))
    messages = [replace(message, session=f"s{number}") for number in range(8)]
    for message in messages:
        one.links.send(other.id, message)
    await one.links.close()
    await other.until(lambda: bool(other.downs))
    assert other.received == [(one.id, message) for message in messages]
    assert (one.downs, other.downs) == ([], [one.id])
    with pytest.raises(LinkError, match="shutting down"):
        await one.dial(other)
    with pytest.raises(LinkError, match="cannot reach"):
        await other.dial(one)


async def test_a_link_comes_back_after_a_restart(start):
    one, other = await pair(start)
    await other.stop()
    await one.until(lambda: one.downs == [other.id])
    again = await start(identity=other.identity)
    await one.dial(again)
    one.links.send(again.id, Renew("s"))
    await again.until(lambda: bool(again.received))
    assert again.received == [(one.id, Renew("s"))]


async def test_both_ends_send_without_delay(start):
    one, other = await pair(start)
    await one.links.ping(other.id)
    for here, there in ((one, other), (other, one)):
        (descriptor,) = here.links._links[there.id]._sockets.values()
        assert descriptor.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_how_fast_large_frames_go_out(start):
    one, other = await pair(start)
    one.links.send(other.id, Hidden("s", 1, 0, 0, True, "float32", (4, 1024), bytes(4 * 4096)))
    await other.until(lambda: len(other.received) == 1)
    assert (one.links.upload, other.links.upload) == (0.0, 0.0)
    one.links.send(other.id, Hidden("s", 1, 0, 0, True, "float32", (64, 4096), bytes(4 * 64 * 4096)))
    await other.until(lambda: len(other.received) == 2)
    await one.links.ping(other.id)
    assert one.links.upload > 0.0
    assert other.links.upload == 0.0


async def test_a_name_is_looked_up_for_each_dial(start, monkeypatch, dead):
    one, other = await start(), await start()
    asked = []

    async def resolve(self, host, port=0, family=socket.AF_INET):
        asked.append(host)
        return [
            {
                "hostname": host,
                "host": "127.0.0.1",
                "port": dead[1] if len(asked) == 1 else port,
                "family": socket.AF_INET,
                "proto": 0,
                "flags": socket.AI_NUMERICHOST,
            }
        ]

    monkeypatch.setattr(aiohttp.DefaultResolver, "resolve", resolve)
    address = ("peer.example", other.address[1])
    with pytest.raises(LinkError, match=f"peer.example:{other.address[1]}: "):
        await one.links.ensure(other.id, [address], other.fingerprint)
    await one.links.ensure(other.id, [address], other.fingerprint)
    assert asked == ["peer.example"] * 2
    assert one.links.peers() == {other.id}


async def test_close_leaves_no_task_and_no_descriptor(start):
    async def come_and_go():
        peers = [await start() for _ in range(3)]
        for one in peers:
            await asyncio.gather(*(one.dial(other) for other in peers))
        assert all(len(one.links.peers()) == 2 for one in peers)
        await asyncio.gather(*(one.stop() for one in peers))

    tasks = asyncio.all_tasks()
    await come_and_go()
    assert asyncio.all_tasks() == tasks
    # The first round may have opened what the loop itself keeps.
    descriptors = psutil.Process().num_fds()
    await come_and_go()
    assert psutil.Process().num_fds() == descriptors
