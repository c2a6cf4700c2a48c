"""Contacts on the wire: what goes out comes in, and what cannot be asked, or would harm, is left out."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pllm.dht.contacts import Contact, is_usable, network_of, pack_contacts, parse_contacts

ID = b"i" * 20
FAR = {4: "198.51.100.1", 6: "2001:db8::99"}


def packed(host: str, port: int = 7600) -> bytes:
    """By the format's description: id, host, port, as they are."""
    return ID + ipaddress.ip_address(host).packed + port.to_bytes(2)


@pytest.mark.parametrize("host", ["192.0.2.1", "10.0.0.1", "169.254.3.4", "2001:db8::1", "fd00::1"])
def test_a_contact_comes_in_as_it_went_out(host: str) -> None:
    contact = Contact(ID, host, 65535)
    assert pack_contacts([contact]) == packed(host, 65535)
    far = FAR[ipaddress.ip_address(host).version]
    assert parse_contacts(packed(host, 65535) * 2, named_by=far) == [contact, contact]
    assert contact.long_id == int(ID.hex(), 16)


@pytest.mark.parametrize(
    "host",
    [
        "0.0.0.0",
        "0.1.2.3",
        "127.0.0.1",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::ffff:192.0.2.1",
        "::192.0.2.1",
        "64:ff9b::192.0.2.1",
        "fe80::1",
        "fec0::1",
        "ff02::1",
    ],
)
def test_a_host_that_cannot_be_or_would_harm_is_left_out(host: str) -> None:
    far = FAR[ipaddress.ip_address(host).version]
    assert parse_contacts(packed(host), named_by=far) == []


def test_port_0_and_what_is_not_whole_are_left_out() -> None:
    assert parse_contacts(packed("192.0.2.1", 0) + packed("192.0.2.2")[:-1], named_by=FAR[4]) == []


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1"])
def test_only_who_is_on_this_machine_may_name_its_loopback(host: str) -> None:
    near = "::1" if ":" in host else "127.0.0.1"
    assert parse_contacts(packed(host), named_by=near) == [Contact(ID, host, 7600)]


@given(st.binary(max_size=1500), st.sampled_from([*FAR.values(), "127.0.0.1", "::1"]))
def test_noise_never_raises_and_gives_only_usable_contacts(noise: bytes, named_by: str) -> None:
    for contact in parse_contacts(noise, named_by=named_by):
        assert is_usable(contact.host)
        assert 1 <= contact.port <= 65535
        assert (":" in contact.host) == (":" in named_by)


@pytest.mark.parametrize("host", ["", "example.org", "fe80::1%lo", "127.0.0.1 ", "1.2.3", "::ffff:127.0.0.1"])
def test_what_is_no_host_to_send_to_is_not_usable(host: str) -> None:
    assert not is_usable(host)


def test_limits_go_by_ipv4_host_and_by_ipv6_network() -> None:
    assert network_of("192.0.2.1") != network_of("192.0.2.2")
    assert network_of("2001:db8:0:1::1") == network_of("2001:db8:0:1:ffff::2")
    assert network_of("2001:db8:0:1::1") != network_of("2001:db8:0:2::1")


@pytest.mark.parametrize("host", ["::1%lo", "fe80::1%1", "2001:db8::1%7"])
def test_a_host_that_only_one_interface_knows_is_not_usable(host: str) -> None:
    assert not is_usable(host)
