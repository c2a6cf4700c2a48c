"""Encrypted links: who may be at their other end, and that nobody is in between."""

from __future__ import annotations

import asyncio
import contextlib
import socket as sockets
import ssl

import pytest

from p2pllm.errors import LinkError
from p2pllm.identity import Identity
from p2pllm.records import SwarmKey
from p2pllm.transport import Renew, make_certificate

DEADLINE_S = 20.0
KEY = SwarmKey(b"the key of the swarm")


@contextlib.asynccontextmanager
async def between(peer):
    """Somebody between a dialer and this peer: (address, fingerprint of their certificate, bytes passed on).

    They end the encryption on one side and begin it again on the other, as who they are not.
    """
    own, passed = make_certificate(), []
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_mode = ssl.CERT_NONE

    async def pass_on(source, target):
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                passed.append(data)
                target.write(data)
        target.close()

    async def meet(reader, writer):
        there = await asyncio.open_connection(*peer.address, ssl=trusting)
        await asyncio.gather(pass_on(reader, there[1]), pass_on(there[0], writer))

    server = await asyncio.start_server(meet, "127.0.0.1", 0, ssl=own.server_context())
    yield server.sockets[0].getsockname()[:2], own.fingerprint, passed
    server.close()


async def test_links_are_encrypted_both_ways(start, raw):
    peer, stranger = await start(), Identity.generate()
    socket = await raw.link(peer, stranger)
    assert socket.get_extra_info("ssl_object").version() == "TLSv1.3"
    one, other = await start(), await start()
    await one.dial(other)
    for here, there in ((one, other), (other, one)):
        (carrier,) = here.links._links[there.id]._sockets
        assert carrier.get_extra_info("ssl_object").version() == "TLSv1.3"


async def test_another_certificate_than_expected_is_told_nothing(start):
    one, other = await start(), await start()
    with pytest.raises(LinkError, match="shows another certificate than its record names"):
        await one.links.ensure(other.id, [other.address], bytes(32))
    assert other.accepted == 0


async def test_somebody_in_between_is_noticed_by_the_certificate(start):
    one, other = await start(), await start()
    async with between(other) as (address, _, passed):
        with pytest.raises(LinkError, match="shows another certificate"):
            await one.links.ensure(other.id, [address], other.fingerprint)
    assert passed == []


async def test_somebody_in_between_who_has_forged_the_record_is_noticed_by_the_signature(start):
    one, other = await start(), await start()
    async with between(other) as (address, fingerprint, passed):
        with pytest.raises(LinkError, match=f"forged signature of peer {other.id[:8]}"):
            await one.links.ensure(other.id, [address], fingerprint)
        assert b"".join(passed).startswith(b"GET /link")
    assert one.links.peers() == other.links.peers() == set()


async def test_somebody_in_between_two_members_of_a_private_swarm_learns_no_more(start):
    one, other = await start(secret=KEY), await start(secret=KEY)
    async with between(other) as (address, fingerprint, passed):
        with pytest.raises(LinkError, match="private"):
            await one.links.ensure(other.id, [address], fingerprint)
        assert other.identity.public_key not in b"".join(passed)


async def test_somebody_in_between_could_carry_a_link_if_the_pin_were_all(start):
    """The tests above would show nothing if this way did not work: it misleads the pin alone."""
    one, other = await start(), await start()
    async with between(other) as (address, fingerprint, _):
        open_as_told = one.links._client.open

        async def open_misled(where, certificate, headers):
            return await open_as_told(where, fingerprint, headers)

        one.links._client.open = open_misled
        await one.links.ensure(other.id, [address], other.fingerprint)
        assert one.links.peers() == {other.id}
        await one.links.close()


@pytest.mark.parametrize(("encrypted", "other"), [(True, False), (False, True)])
async def test_both_sides_encrypt_or_neither_does(start, encrypted, other):
    one, two = await start(encrypted=encrypted), await start(encrypted=other)
    with pytest.raises(LinkError, match=f"peer {two.id[:8]} .*: give --insecure-links to all peers"):
        await one.dial(two)
    # A record from before its peer was started anew with the other setting.
    stale = make_certificate().fingerprint if encrypted else b""
    with pytest.raises(LinkError, match="give --insecure-links to all peers of a swarm or to none"):
        await one.links.ensure(two.id, [two.address], stale)
    assert two.accepted == 0


async def test_without_encryption_identities_are_proved_all_the_same(start):
    one, other, stranger = await start(encrypted=False), await start(encrypted=False), Identity.generate()
    with pytest.raises(LinkError, match=f"belongs to peer {other.id[:8]}"):
        await one.links.ensure(stranger.peer_id, [other.address], b"")
    await one.dial(other)
    one.links.send(other.id, Renew("s"))
    await other.until(lambda: other.received == [(one.id, Renew("s"))])
    (carrier,) = one.links._links[other.id]._sockets
    assert carrier.get_extra_info("ssl_object") is None


@pytest.mark.parametrize("encrypted", [True, False])
async def test_members_of_a_private_swarm_link(start, encrypted):
    one, other = await start(secret=KEY, encrypted=encrypted), await start(secret=KEY, encrypted=encrypted)
    await one.dial(other)
    other.links.send(one.id, Renew("s"))
    await one.until(lambda: one.received == [(other.id, Renew("s"))])


@pytest.mark.parametrize("secret", [None, SwarmKey(b"some other swarm's key")])
async def test_outsiders_are_told_that_the_swarm_is_private(start, secret):
    one, member = await start(secret=secret), await start(secret=KEY)
    with pytest.raises(LinkError, match="this swarm is private: pass its key with --swarm-key-file"):
        await one.dial(member)
    assert one.links.peers() == member.links.peers() == set()


async def test_a_member_is_told_that_a_public_swarm_is_another(start):
    member, other = await start(secret=KEY), await start()
    with pytest.raises(LinkError, match=f"{other.id[:8]} serves another model"):
        await member.dial(other)


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02\x00", b"GET /link HTTP/1.1\r\n\r\n"])
async def test_strangers_who_never_finish_the_encryption_are_not_waited_for(start, said):
    peer, friend = await start(), await start()
    _, writer = await asyncio.open_connection(*peer.address)
    writer.write(said)
    await writer.drain()
    await friend.dial(peer)
    async with asyncio.timeout(1.0):
        await peer.stop()
    writer.close()


async def test_the_end_does_not_wait_for_strangers_to_agree_to_it(start):
    """One that keeps its connection and reads nothing any more."""
    peer, trusting = await start(), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_mode = ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(*peer.address, ssl=trusting)
    writer.write(b"GET / HTTP/1.1\r\nHost: peer\r\n\r\n")
    assert await reader.readline() == b"HTTP/1.1 404 Not Found\r\n"
    writer.transport.pause_reading()
    await peer.stop()
    await peer.until_alone()
    writer.transport.abort()


async def test_links_over_ipv6(start):
    try:
        with sockets.socket(sockets.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    one, other = await start(host="::1"), await start(host="::1")
    await one.dial(other)
    assert one.links.peers() == {other.id}
