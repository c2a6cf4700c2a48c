"""Links against peers that lie, break off, stall, or send garbage."""

from __future__ import annotations

import asyncio
import os
import socket as sockets
import time
from types import SimpleNamespace

import aiohttp
import msgpack
import psutil
import pytest
from aiohttp import WSMsgType, web

from p2pllm.errors import LinkError
from p2pllm.identity import Identity
from p2pllm.transport import LINK_PATH, Close, Hidden, Limits, Ping, Pong, Renew, decode, encode, serve
from p2pllm.transport.handshake import NONCE_BYTES, Acceptor, Dialer, Terms
from p2pllm.transport.link import MAX_SOCKETS

SWARM = bytes(range(20))
DEADLINE_S = 20.0


def dialer_to(peer, identity, swarm=SWARM):
    return Dialer(identity, Terms(swarm, peer.fingerprint), peer.id, os.urandom(NONCE_BYTES))


async def farewell(socket):
    """The other side's reason for closing, once it has."""
    while True:
        received = await socket.receive(timeout=DEADLINE_S)
        if received.type is WSMsgType.CLOSE:
            return received.extra
        assert received.type is WSMsgType.BINARY, received


def impostor(victim, forger):
    """An identity that shows the victim's key and signs with the forger's."""
    return SimpleNamespace(public_key=victim.public_key, peer_id=victim.peer_id, sign=forger.sign)


def cut(socket):
    """Break a socket's connection without a word."""
    raw = socket.get_extra_info("socket")
    with sockets.fromfd(raw.fileno(), raw.family, raw.type) as twin:
        twin.shutdown(sockets.SHUT_RDWR)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda hello: "", "0 bytes instead of 97"),
        (lambda hello: "no hex", "no handshake in hexadecimal"),
        (lambda hello: hello[:-2], "96 bytes instead of 97"),
        (lambda hello: hello + "00", "98 bytes instead of 97"),
        (lambda hello: "01" + hello[2:], "speaks link version 2: update the older"),
        (lambda hello: hello[:2] + "00" * 20 + hello[42:], "serves another model"),
    ],
)
async def test_a_bad_hello_is_refused_with_the_reason(start, raw, change, reason):
    peer = await start()
    hello = dialer_to(peer, Identity.generate()).hello().hex()
    assert reason in await farewell(await raw.open(peer, change(hello)))
    assert peer.links.peers() == set()


async def test_a_plain_request_is_no_link(start):
    peer = await start()
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"https://127.0.0.1:{peer.server.port}{LINK_PATH}", ssl=False) as response,
    ):
        assert response.status == 400


async def test_a_dialer_cannot_pass_for_another(start, raw):
    peer, victim, forger = await start(), Identity.generate(), Identity.generate()
    socket = await raw.link(peer, impostor(victim, forger))
    assert await farewell(socket) == "forged signature of the dialling peer"
    assert peer.links.peers() == set()


async def test_a_proof_cannot_be_replayed(start, raw):
    peer, victim = await start(), Identity.generate()
    overheard = dialer_to(peer, victim)
    socket = await raw.open(peer, overheard.hello().hex())
    proof = overheard.prove(await socket.receive_bytes(timeout=DEADLINE_S))
    again = await raw.open(peer, overheard.hello().hex())
    await again.receive_bytes(timeout=DEADLINE_S)
    await again.send_bytes(proof)
    assert "forged" in await farewell(again)
    await socket.send_bytes(proof)
    await socket.send_bytes(encode(Renew("s")))
    await peer.until(lambda: peer.received == [(victim.peer_id, Renew("s"))])


async def answering(answer):
    """A server whose /link is ``answer``."""
    app = web.Application()
    app.router.add_get(LINK_PATH, answer)
    return await serve(app, ["127.0.0.1"], 0)


async def test_an_acceptor_cannot_pass_for_another(start):
    peer, victim, forger = await start(encrypted=False), Identity.generate(), Identity.generate()

    async def answer(request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        acceptor = Acceptor(impostor(victim, forger), Terms(SWARM), os.urandom(NONCE_BYTES))
        await socket.send_bytes(acceptor.reply(bytes.fromhex(request.headers["P2PLLM-Hello"])))
        reasons.append((await socket.receive()).extra)
        return socket

    reasons: list[str] = []
    server = await answering(answer)
    with pytest.raises(LinkError, match=f"forged signature of peer {victim.peer_id[:8]}"):
        await peer.links.ensure(victim.peer_id, [("127.0.0.1", server.port)], b"")
    await server.close()
    assert reasons == [f"forged signature of peer {victim.peer_id[:8]}"]


async def test_an_acceptor_that_falls_silent_is_given_up_and_left(start):
    peer, victim, left = await start(encrypted=False), Identity.generate(), asyncio.Event()

    async def answer(request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        try:
            await socket.receive()
        finally:
            left.set()
        return socket

    server = await answering(answer)
    address = ("127.0.0.1", server.port)
    with pytest.raises(LinkError, match=f"127.0.0.1:{server.port}: does not answer"):
        await peer.links.ensure(victim.peer_id, [address], b"", timeout=0.2)
    async with asyncio.timeout(DEADLINE_S):
        await left.wait()
    await server.close()


async def test_a_redirect_is_not_followed(start):
    peer, target = await start(encrypted=False), await start(encrypted=False)

    async def answer(request):
        raise web.HTTPFound(f"http://127.0.0.1:{target.server.port}{LINK_PATH}")

    server = await answering(answer)
    with pytest.raises(LinkError, match="redirects"):
        await peer.links.ensure(target.id, [("127.0.0.1", server.port)], b"")
    await server.close()
    assert target.accepted == 0


async def test_an_ordinary_web_server_is_no_peer(start):
    peer, other = await start(encrypted=False), Identity.generate()
    server = await serve(web.Application(), ["127.0.0.1"], 0)
    with pytest.raises(LinkError, match="404"):
        await peer.links.ensure(other.peer_id, [("127.0.0.1", server.port)], b"")
    await server.close()


@pytest.mark.parametrize(
    ("garbage", "reason"),
    [
        (b"", "malformed frame: a frame of 0 bytes"),
        (b"\x00\x00\x00", "malformed frame"),
        (b"\xff\xff\xff\xff", "malformed frame: a header of"),
        (len(msgpack.packb([99])).to_bytes(4, "big") + msgpack.packb([99]), "unknown kind"),
        (encode(Renew("s"))[:-1], "malformed frame"),
        ("text", "malformed frame: text"),
    ],
)
async def test_garbage_closes_its_own_link_only(start, raw, garbage, reason):
    peer, friend = await start(), await start()
    await friend.dial(peer)
    stranger = Identity.generate()
    socket = await raw.link(peer, stranger)
    await socket.send_bytes(encode(Close("s")))
    await (socket.send_str if isinstance(garbage, str) else socket.send_bytes)(garbage)
    await socket.send_bytes(encode(Close("never-seen")))
    assert reason in await farewell(socket)
    assert peer.received == [(stranger.peer_id, Close("s"))]
    assert peer.downs == [stranger.peer_id]
    assert peer.links.peers() == {friend.id}
    await friend.links.ping(peer.id)


async def test_a_message_over_the_limit_is_refused_before_it_is_read(start, raw):
    peer, stranger = await start(encrypted=False, limits=Limits(frame=1000)), Identity.generate()
    socket = await raw.link(peer, stranger)
    frame = bytearray(b"\x82\xff" + (2**40).to_bytes(8, "big") + bytes(4))
    raw_socket = socket.get_extra_info("socket")
    with sockets.fromfd(raw_socket.fileno(), raw_socket.family, raw_socket.type) as twin:
        twin.setblocking(True)
        twin.sendall(frame)
    await peer.until(lambda: peer.downs == [stranger.peer_id])
    assert peer.received == []


async def test_a_handler_that_fails_costs_one_link(start, raw):
    def on_message(sender, message):
        raise RuntimeError("a bug")

    peer, friend = await start(on_message=on_message), await start()
    await friend.dial(peer)
    stranger = Identity.generate()
    socket = await raw.link(peer, stranger)
    await socket.send_bytes(encode(Close("s")))
    assert await farewell(socket) == "internal error"
    assert peer.downs == [stranger.peer_id]
    await friend.links.ping(peer.id)


async def test_two_sockets_are_one_link(start, raw):
    peer, stranger = await start(), Identity.generate()
    first = await raw.link(peer, stranger)
    await first.send_bytes(encode(Renew("first")))
    await peer.until(lambda: len(peer.received) == 1)
    second = await raw.link(peer, stranger)
    await second.send_bytes(encode(Renew("second")))
    await peer.until(lambda: len(peer.received) == 2)
    # Both are read; all that is sent goes out on the one that was first.
    for number in range(20):
        peer.links.send(stranger.peer_id, Renew(f"s{number}"))
    for number in range(20):
        assert decode(await first.receive_bytes(timeout=DEADLINE_S)) == Renew(f"s{number}")
    # Either one's end is the link's end, told once, and frees the other.
    cut(second)
    assert await first.receive(timeout=DEADLINE_S)
    await peer.until(lambda: bool(peer.downs))
    assert peer.links.peers() == set()
    assert peer.received == [(stranger.peer_id, Renew("first")), (stranger.peer_id, Renew("second"))]
    again = await raw.link(peer, stranger)
    await again.send_bytes(encode(Renew("again")))
    await peer.until(lambda: len(peer.received) == 3)
    assert peer.downs == [stranger.peer_id]


async def test_sockets_of_one_peer_are_bounded(start, raw):
    peer, stranger = await start(), Identity.generate()
    taken = [await raw.link(peer, stranger) for _ in range(MAX_SOCKETS)]
    for number, socket in enumerate(taken):
        await socket.send_bytes(encode(Renew(f"s{number}")))
    await peer.until(lambda: len(peer.received) == MAX_SOCKETS)
    assert await farewell(await raw.link(peer, stranger)) == "too many sockets of one peer"
    assert peer.downs == []


async def stuffed(start, raw, stall_s):
    """A peer that sends to a stranger who does not read, with more queued than any kernel takes in."""
    limit, size = 64 * 1024**2, 4 * 1024**2
    peer, stranger = await start(limits=Limits(frame=limit), stall_s=stall_s), Identity.generate()
    socket = await raw.link(peer, stranger, max_msg_size=0)
    await socket.send_bytes(encode(Renew("s")))
    await peer.until(lambda: bool(peer.received))
    message = Hidden("s", 1, 0, 0, False, "float32", (1, size // 4), bytes(size))
    for _ in range(limit // len(encode(message))):
        peer.links.send(stranger.peer_id, message)
    with pytest.raises(LinkError, match=f"link to peer {stranger.peer_id[:8]} is congested"):
        peer.links.send(stranger.peer_id, message)
    return peer, stranger, socket


async def test_a_peer_that_reads_nothing_is_dropped(start, raw):
    peer, stranger, _socket = await stuffed(start, raw, stall_s=0.1)
    await peer.until(lambda: peer.downs == [stranger.peer_id])
    # Its connection ends although the transport still has megabytes to send.
    await peer.stop()
    await peer.until_alone()


async def test_a_peer_that_reads_nothing_and_sends_garbage_is_dropped(start, raw):
    peer, stranger, socket = await stuffed(start, raw, stall_s=DEADLINE_S)
    await socket.send_bytes(b"garbage")
    await peer.until(lambda: peer.downs == [stranger.peer_id])
    await peer.stop()
    await peer.until_alone()


async def test_close_does_not_wait_for_a_peer_that_reads_nothing(start, raw):
    peer, _stranger, _socket = await stuffed(start, raw, stall_s=0.1)
    async with asyncio.timeout(DEADLINE_S):
        await peer.stop()
    await peer.until_alone()
    assert peer.downs == []


async def test_a_peer_we_dialled_that_reads_nothing_and_sends_garbage_is_dropped(start):
    peer, victim = await start(encrypted=False), Identity.generate()
    queued, over = asyncio.Event(), asyncio.Event()

    async def answer(request):
        socket = web.WebSocketResponse(max_msg_size=0)
        await socket.prepare(request)
        acceptor = Acceptor(victim, Terms(SWARM), os.urandom(NONCE_BYTES))
        await socket.send_bytes(acceptor.reply(bytes.fromhex(request.headers["P2PLLM-Hello"])))
        acceptor.admit(await socket.receive_bytes())
        request.transport.pause_reading()
        await queued.wait()
        await socket.send_bytes(b"garbage")
        await over.wait()
        request.transport.abort()
        return socket

    server = await answering(answer)
    await peer.links.ensure(victim.peer_id, [("127.0.0.1", server.port)], b"")
    size = 60 * 1024**2
    peer.links.send(victim.peer_id, Hidden("s", 1, 0, 0, False, "float32", (size // 4,), bytes(size)))
    queued.set()
    await peer.until(lambda: peer.downs == [victim.peer_id])

    def connected():
        return any(c.raddr and c.raddr.port == server.port for c in psutil.Process().net_connections("tcp"))

    async with asyncio.timeout(DEADLINE_S):
        while connected():
            await asyncio.sleep(0)
    over.set()
    await server.close()


async def test_a_peer_that_only_listens_is_dropped_after_the_heartbeat(start, raw):
    peer, stranger = await start(heartbeat_s=0.1), Identity.generate()
    socket = await raw.link(peer, stranger, autoping=False)
    await peer.until(lambda: peer.downs == [stranger.peer_id])
    await peer.until_alone()
    await socket.close()


async def test_who_sends_too_fast_is_held_back_and_loses_nothing(start, raw):
    peer, stranger, friend = await start(), Identity.generate(), await start()
    await friend.dial(peer)
    socket, count = await raw.link(peer, stranger, autoping=False), 3000
    started = time.monotonic()

    async def flood():
        for number in range(count):
            await socket.send_bytes(encode(Renew(f"s{number}")))
            await socket.ping(b"and this")

    flooding = asyncio.create_task(flood())
    # The others are served in between.
    while len(peer.received) < count // 2:
        await friend.links.ping(peer.id, timeout=DEADLINE_S)
    await peer.until(lambda: len(peer.received) == count)
    await flooding
    # 6000 frames at 250 in 25 ms, but for the first and the last.
    assert time.monotonic() - started >= 22 * 0.025
    assert peer.received == [(stranger.peer_id, Renew(f"s{number}")) for number in range(count)]
    assert peer.links.peers() == {stranger.peer_id, friend.id}


async def test_who_makes_much_work_with_few_frames_is_held_back_too(start, raw):
    done, finished, count = [], asyncio.Event(), 24

    def work(sender, message):
        started = time.thread_time()
        while time.thread_time() - started < 0.005:
            pass
        done.append(message)
        if len(done) == count:
            finished.set()

    peer = await start(on_message=work)
    socket = await raw.link(peer, Identity.generate())
    started = time.monotonic()
    for number in range(count):
        await socket.send_bytes(encode(Renew(f"s{number}")))
    async with asyncio.timeout(DEADLINE_S):
        await finished.wait()
    # Two of them are as much as there may be in 25 ms; what comes last need not be waited for.
    assert time.monotonic() - started >= (count // 2 - 2) * 0.025
    assert done == [Renew(f"s{number}") for number in range(count)]


async def test_pings_of_the_websocket_are_answered(start, raw):
    peer = await start()
    socket = await raw.link(peer, Identity.generate(), autoping=False)
    await socket.ping(b"are you there")
    received = await socket.receive(timeout=DEADLINE_S)
    assert (received.type, bytes(received.data)) == (WSMsgType.PONG, b"are you there")


async def test_there_are_only_so_many_links(start, raw):
    peer, one, two, three = await start(max_links=2), await start(), await start(), await start()
    await one.dial(peer)
    socket = await raw.link(peer, Identity.generate())
    assert await farewell(socket) == "the peer has too many links"
    await peer.dial(two)  # for whom it dials itself there is room kept
    with pytest.raises(LinkError, match="too many links"):
        await peer.dial(three)
    await one.links.close()
    await peer.until(lambda: peer.downs == [one.id])
    await peer.dial(three)


async def test_many_half_done_handshakes_keep_nobody_out(start, raw, monkeypatch):
    monkeypatch.setattr("p2pllm.transport.links._MAX_GREETINGS", 4)
    monkeypatch.setattr("p2pllm.transport.links._HANDSHAKE_S", DEADLINE_S)
    peer, friend = await start(), await start()
    halves = [await raw.open(peer, dialer_to(peer, Identity.generate()).hello().hex()) for _ in range(6)]
    for half in halves:
        await half.receive_bytes(timeout=DEADLINE_S)
    await friend.dial(peer)
    for half in halves[:3]:  # the oldest had to make room: two for the others, one for the friend
        assert await farewell(half) == "no answer"
    assert peer.links.peers() == {friend.id}


async def test_who_is_gone_before_the_answer_is_no_news(start, raw, monkeypatch, caplog):
    async def gone(*_):
        raise ConnectionResetError

    peer = await start()
    monkeypatch.setattr(web.WebSocketResponse, "prepare", gone)
    with pytest.raises(aiohttp.WSServerHandshakeError):
        await raw.open(peer, dialer_to(peer, Identity.generate()).hello().hex())
    assert caplog.records == []


async def test_whoever_leaves_says_so(start, raw):
    peer = await start()
    socket = await raw.link(peer, Identity.generate())
    await socket.send_bytes(encode(Renew("s")))
    await peer.until(lambda: bool(peer.received))
    leaving = asyncio.create_task(peer.links.close())
    last = decode(await socket.receive_bytes(timeout=DEADLINE_S))
    await socket.send_bytes(encode(Pong(last.nonce)))
    assert await farewell(socket) == "the peer is leaving"
    await leaving


async def test_a_connection_that_breaks_is_known_at_once(start, raw):
    peer, stranger = await start(), Identity.generate()
    socket = await raw.link(peer, stranger)
    await socket.send_bytes(encode(Renew("s")))
    await peer.until(lambda: bool(peer.received))
    waiting = asyncio.create_task(peer.links.ping(stranger.peer_id, timeout=10 * DEADLINE_S))
    assert isinstance(decode(await socket.receive_bytes(timeout=DEADLINE_S)), Ping)
    cut(socket)
    with pytest.raises(LinkError, match="went down"):
        await waiting
    assert peer.downs == [stranger.peer_id]


async def test_pings_are_answered_and_pongs_must_fit(start, raw):
    peer, stranger = await start(), Identity.generate()
    socket = await raw.link(peer, stranger)
    await socket.send_bytes(encode(Ping(7)))
    assert decode(await socket.receive_bytes(timeout=DEADLINE_S)) == Pong(7)
    waiting = asyncio.create_task(peer.links.ping(stranger.peer_id, timeout=DEADLINE_S))
    nonce = decode(await socket.receive_bytes(timeout=DEADLINE_S)).nonce
    for _ in range(2):
        await socket.send_bytes(encode(Pong(nonce)))
    assert await waiting > 0.0
    waiting = asyncio.create_task(peer.links.ping(stranger.peer_id, timeout=0.05))
    nonce = decode(await socket.receive_bytes(timeout=DEADLINE_S)).nonce
    await socket.send_bytes(encode(Pong(nonce ^ 1)))
    with pytest.raises(LinkError, match="did not answer a ping"):
        await waiting
    # Too late.
    await socket.send_bytes(encode(Pong(nonce)))
    await socket.send_bytes(encode(Renew("s")))
    await peer.until(lambda: bool(peer.received))
    assert peer.links.peers() == {stranger.peer_id}
