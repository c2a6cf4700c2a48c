"""IPv4 and IPv6 side by side: a socket each on one port, a network each, one storage."""

from __future__ import annotations

import asyncio
import errno
import socket

import pytest
from support.dht import KEY, Network, Stranger, eventually, protocol_of
from support.waiting import has_ipv6

from p2pllm.dht import Contact, DhtNode
from p2pllm.dht import sockets as sockets_module
from p2pllm.errors import PortTakenError
from p2pllm.identity import Identity

needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")


@needs_ipv6
async def test_both_families_share_a_port_and_are_apart(network: Network) -> None:
    node = await network.node(None, "127.0.0.1", "::1")
    first, second = node._overlays
    assert (first.family, second.family) == (socket.AF_INET, socket.AF_INET6)
    for overlay in node._overlays:
        assert overlay.protocol.transport.get_extra_info("sockname")[1] == node.port
    with pytest.raises(PortTakenError, match=r"\[::1\]:"):
        await DhtNode(Identity.generate()).start(["::1"], node.port)


@needs_ipv6
async def test_what_is_put_over_one_family_is_read_over_the_other(network: Network) -> None:
    """Nodes with both carry records between those that have only one."""
    both = [await network.node(None, "127.0.0.1", "::1") for _ in range(2)]
    four, six = await network.node(), await network.node(None, "::1")
    assert await both[1].bootstrap([("127.0.0.1", both[0].port), ("::1", both[0].port)]) == 1
    assert await four.bootstrap([("127.0.0.1", both[0].port), ("::1", both[0].port)]) == 1
    assert await six.bootstrap([("127.0.0.1", both[0].port), ("::1", both[0].port)]) == 1
    await eventually(lambda: len(both[1].contacts()) == 4)
    await network.publish(four, six, *both)
    for node in (four, six, *both):
        assert await network.read_by(node) == network.ids(four, six, *both)
    assert {contact.host for contact in both[0].contacts()} == {"127.0.0.1", "::1"}
    assert {host for host, _ in both[0].good()} == {"127.0.0.1", "::1"}


@needs_ipv6
async def test_a_node_of_both_families_gets_a_record_once(network: Network) -> None:
    one, other = [await network.node(None, "127.0.0.1", "::1") for _ in range(2)]
    await one.bootstrap([("127.0.0.1", other.port), ("::1", other.port)])
    assert len(one.contacts()) == 2
    assert await one.put(KEY, network.record(one)) == 2


@needs_ipv6
async def test_a_name_is_tried_at_all_its_addresses(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def resolve(name: str, family: socket.AddressFamily) -> list[str]:
        assert name == "bootstrap.example"
        return ["127.0.0.2", "127.0.0.1"] if family == socket.AF_INET else ["::1"]

    monkeypatch.setattr("p2pllm.dht.node.resolve", resolve)
    four, six = await network.node(), await network.node(None, "::1")
    assert await (await network.node()).bootstrap([("bootstrap.example", four.port)]) == 1
    assert await (await network.node(None, "::1")).bootstrap([("bootstrap.example", six.port)]) == 1


async def test_addresses_that_mean_nothing_elsewhere_are_neither_asked_nor_heard(
    network: Network, stranger: Stranger
) -> None:
    node = await network.node()
    for host in ("fe80::1", "::ffff:127.0.0.1", "::ffff:7f00:1"):
        assert await sockets_module.resolve(host, socket.AF_INET6) == []
        assert await node.bootstrap([(host, stranger.address[1])]) == 0
        protocol_of(node).datagram_received(stranger.request("ping"), (host, 7600, 0, 0))
    protocol_of(node).datagram_received(stranger.request("ping"), ("127.0.0.1", 0))
    protocol_of(node).datagram_received(stranger.request("ping"), ("fe80::1%lo", 7600, 0, 1))
    await stranger.ask(node, "ping")
    assert stranger.received.empty()
    assert stranger.asked == []


@pytest.mark.parametrize("reason", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL])
async def test_without_ipv6_the_host_that_means_all_of_it_is_left_out(
    network: Network, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    class Without6(socket.socket):
        def bind(self, address: tuple[str, int]) -> None:
            if self.family == socket.AF_INET6:
                raise OSError(reason, "no IPv6 here")
            super().bind(address)

    with monkeypatch.context() as patched:
        patched.setattr(sockets_module.socket, "socket", Without6)
        node = await network.node(None, "127.0.0.1", "::")
    assert [overlay.family for overlay in node._overlays] == [socket.AF_INET]


async def test_a_free_port_is_free_in_both_families(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the port that the system gave to one is taken in the other, another one is tried."""
    refused = 0

    class Taken(socket.socket):
        def bind(self, address: tuple[str, int]) -> None:
            nonlocal refused
            if self.family == socket.AF_INET6 and refused < 3:
                refused += 1
                raise OSError(errno.EADDRINUSE, "taken")
            super().bind(address)

    if not has_ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    with monkeypatch.context() as patched:
        patched.setattr(sockets_module.socket, "socket", Taken)
        node = await network.node(None, "127.0.0.1", "::1")
    assert refused == 3
    assert len(node._overlays) == 2


async def test_a_moved_node_is_met_in_the_family_of_its_address(network: Network) -> None:
    node = await network.node()
    node.moved(b"i" * 20, [("::1", 7600), ("not-a-number.example", 7600), ("127.0.0.1", 0)])
    assert not protocol_of(node)._greetings
    other = await network.node()
    node.moved(network.identities[other].node_id, [("127.0.0.1", other.port)])
    here = Contact(network.identities[other].node_id, "127.0.0.1", other.port)
    await eventually(lambda: node.contacts() == [here])
    await asyncio.sleep(0)


@needs_ipv6
async def test_a_moved_node_is_met_however_its_address_is_written(network: Network) -> None:
    one, other = await network.node(None, "::1"), await network.node(None, "::1")
    one.moved(network.identities[other].node_id, [("0:0::0001", other.port)])
    here = Contact(network.identities[other].node_id, "::1", other.port)
    await eventually(lambda: one.contacts() == [here])
