"""Which addresses a peer advertises: what it is told, what it listens on, or the machine's own."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import psutil
import pytest

from p2pllm import addresses
from p2pllm.addresses import EVERYWHERE, MAX_ADDRESSES, advertised, is_loopback
from p2pllm.config import Address


def _family(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class Entry(NamedTuple):
    family: int
    address: str


class State(NamedTuple):
    isup: bool


class Machine:
    """This machine with other interfaces, and a kernel that knows other ways."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        self.interfaces: dict[str, Sequence[str]] = {}
        self.down: set[str] = set()
        self.names: dict[str, Sequence[str]] = {}
        self.ways: dict[str, str] = {}
        self._flags = directory / "if_inet6"
        monkeypatch.setattr(psutil, "net_if_addrs", self._entries)
        monkeypatch.setattr(
            psutil, "net_if_stats", lambda: {name: State(name not in self.down) for name in self.interfaces}
        )
        monkeypatch.setattr(socket, "getaddrinfo", self._look_up)
        monkeypatch.setattr(socket, "socket", lambda family, kind: Probe(family, self.ways))
        monkeypatch.setattr(addresses, "_ADDRESS_FLAGS", self._flags)

    def flag(self, flags: Mapping[str, int]) -> None:
        """Say of IPv6 addresses what Linux says of them."""
        self._flags.write_text(
            "".join(
                f"{socket.inet_pton(socket.AF_INET6, address).hex()} 02 40 00 {flag:02x}     eth0\n"
                for address, flag in flags.items()
            )
        )

    def _entries(self) -> dict[str, list[Entry]]:
        mac = Entry(socket.AF_PACKET, "00:00:00:00:00:00")
        return {
            name: [mac, *(Entry(_family(host), host) for host in hosts)]
            for name, hosts in self.interfaces.items()
        }

    def _look_up(self, host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        if host not in self.names and not set(host) <= set("0123456789abcdef.:"):
            raise socket.gaierror(-2, "Name or service not known")
        return [
            (_family(found), socket.SOCK_DGRAM, 17, "", (found, port))
            for found in self.names.get(host, [host])
        ]


class Probe:
    """A UDP socket that only tells where it would send from."""

    def __init__(self, family: int, ways: Mapping[str, str]) -> None:
        self._family = family
        self._ways = ways
        self._source = ""

    def connect(self, target: Address) -> None:
        assert _family(target[0]) == self._family
        if target[0] not in self._ways:
            raise OSError(101, "Network is unreachable")
        self._source = self._ways[target[0]]

    def getsockname(self) -> Address:
        return self._source, 40000

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    # The checks of pytest and asyncio want true sockets back as soon as the test is done.
    with monkeypatch.context() as patched:
        yield Machine(patched, tmp_path)


def found(*towards: str, hosts: Sequence[str] = EVERYWHERE) -> list[str]:
    chosen = advertised(hosts, 7, (), [(host, 7600) for host in towards])
    assert {port for _, port in chosen} == {7}
    return [host for host, _ in chosen]


@pytest.mark.parametrize(
    "hosts", [("127.0.0.1",), ("127.0.0.1", "::1"), ("example.org",), ("192.0.2.9", "2001:db8::9")]
)
def test_what_one_listens_on_by_name_is_the_answer(machine: Machine, hosts: Sequence[str]) -> None:
    machine.interfaces = {"eth0": ["192.0.2.7", "2001:db8::7"]}
    machine.ways = {"198.51.100.1": "192.0.2.7"}
    assert found("198.51.100.1", hosts=hosts) == list(hosts)


def test_an_address_beside_a_wildcard_of_the_other_family(machine: Machine) -> None:
    machine.interfaces = {"eth0": ["192.0.2.7", "192.0.2.8", "2001:db8::7"]}
    assert found(hosts=("192.0.2.8", "::")) == ["192.0.2.8", "2001:db8::7"]


def test_what_the_user_says_wins_and_names_stay_names() -> None:
    given = ("example.org", "203.0.113.5:9", "[2001:db8::1]:8", "2001:db8::2")
    assert advertised(EVERYWHERE, 7, given, [("127.0.0.1", 1)]) == (
        ("example.org", 7),
        ("203.0.113.5", 9),
        ("2001:db8::1", 8),
        ("2001:db8::2", 7),
    )
    assert advertised(EVERYWHERE, 7, ["[2001:db8::1]", "2001:db8::1"], ()) == (("2001:db8::1", 7),)
    assert len(advertised(EVERYWHERE, 7, [f"h{n}" for n in range(9)], ())) == MAX_ADDRESSES


def test_the_way_to_the_swarm_comes_first_then_ipv4_then_ipv6(machine: Machine) -> None:
    machine.interfaces = {
        "eth0": ["10.0.0.7", "fd00::7"],
        "eth1": ["8.8.4.4", "2606:4700::7"],
        "eth2": ["192.168.1.6", "192.168.1.7"],
    }
    assert found() == ["8.8.4.4", "10.0.0.7", "192.168.1.6", "192.168.1.7"]
    assert found(hosts=("::",)) == ["2606:4700::7", "fd00::7"]
    machine.names = {"seed.example": ["2001:db8::1", "198.51.100.1", "198.51.100.2"]}
    machine.ways = {"198.51.100.1": "192.168.1.7", "198.51.100.2": "8.8.4.4", "2001:db8::1": "fd00::7"}
    assert found("seed.example") == ["192.168.1.7", "fd00::7", "192.168.1.6", "8.8.4.4"]


@pytest.mark.parametrize(
    ("hosts", "chosen"),
    [
        (("0.0.0.0",), ["192.0.2.7"]),
        (("::",), ["2001:db8::7"]),
        (EVERYWHERE, ["192.0.2.7", "2001:db8::7"]),
    ],
)
def test_only_families_that_are_listened_on(
    machine: Machine, hosts: Sequence[str], chosen: list[str]
) -> None:
    machine.interfaces = {"eth0": ["192.0.2.7", "2001:db8::7"]}
    machine.ways = {"198.51.100.1": "192.0.2.7", "2001:db8::1": "2001:db8::7"}
    assert found("198.51.100.1", "2001:db8::1", hosts=hosts) == chosen


@pytest.mark.parametrize(
    "name",
    [
        "docker0",
        "docker_gwbridge",
        "br-9d2c4f1a77e0",
        "veth1a2b3c4",
        "podman0",
        "cni0",
        "nerdctl0",
        "flannel.1",
        "cali9f8e7d6c5b4",
        "vxlan.calico",
        "tunl0",
        "cilium_host",
        "kube-ipvs0",
        "virbr0",
        "vnet3",
        "lxcbr0",
        "lxdbr0",
        "incusbr0",
        "mpqemubr0",
        "vmnet8",
        "vboxnet0",
        "bridge100",
        "vEthernet (WSL (Hyper-V firewall))",
        "vEthernet (Default Switch)",
        "VirtualBox Host-Only Network",
        "VMware Network Adapter VMnet1",
    ],
)
def test_what_leads_only_into_this_machine_is_never_chosen(machine: Machine, name: str) -> None:
    machine.interfaces = {name: ["172.17.0.1", "fd17::1"], "wlan0": ["192.0.2.7"]}
    machine.ways = {"172.17.0.2": "172.17.0.1"}  # not even if a bootstrap node is in there
    assert found("172.17.0.2") == ["192.0.2.7"]
    machine.interfaces = {name: ["172.17.0.1", "fd17::1"]}
    assert found() == ["127.0.0.1"]


@pytest.mark.parametrize(
    "name",
    [
        "eth0",
        "enp3s0",
        "wlan0",
        "br0",
        "bridge0",
        "en0",
        "tailscale0",
        "wg0",
        "tun0",
        "utun4",
        "zt5u4y6ejv",
        "venet0",
        "Ethernet",
        "Tailscale",
        "vEthernet (External)",
        "vEthernet (LAN)",
    ],
)
def test_networks_and_tunnels_between_machines_are_wanted(machine: Machine, name: str) -> None:
    machine.interfaces = {name: ["100.101.102.103", "fd7a:115c:a1e0::1"]}
    assert found() == ["100.101.102.103", "fd7a:115c:a1e0::1"]


def test_link_local_loopback_and_sleeping_interfaces_are_left_out(machine: Machine) -> None:
    machine.interfaces = {
        "eth0": ["192.0.2.7", "fe80::1%eth0"],
        "lo": ["127.0.0.1", "::1"],
        "ppp0": ["0.0.0.0"],
        "usb0": ["169.254.3.3"],
        "wlan0": ["198.51.100.9"],
        "wlan1": ["198.51.100.10"],
    }
    machine.down = {"wlan1"}
    machine.ways = {"127.0.0.1": "127.0.0.1", "::1": "::1"}
    # The way to a bootstrap node on this very machine tells nothing.
    assert found("127.0.0.1", "::1") == ["192.0.2.7", "198.51.100.9"]


def test_an_address_that_will_be_gone_is_replaced_by_its_neighbour(machine: Machine) -> None:
    machine.interfaces = {
        "eth0": ["10.0.0.7"],
        "wlan0": ["2001:db8::aaaa", "2001:db8::bbbb", "2001:db8::cccc", "2001:db8::dddd"],
    }
    machine.flag({"2001:db8::aaaa": 0x01, "2001:db8::bbbb": 0x20, "2001:db8::dddd": 0x40})
    machine.ways = {"2001:db8:ffff::1": "2001:db8::aaaa"}  # systems like to send from temporary ones
    assert found("2001:db8:ffff::1") == ["2001:db8::cccc", "10.0.0.7"]


@pytest.mark.parametrize(("hosts", "itself"), [(EVERYWHERE, "127.0.0.1"), (("::",), "::1")])
def test_a_machine_without_a_network_still_has_itself(
    machine: Machine, hosts: Sequence[str], itself: str
) -> None:
    machine.interfaces = {"lo": ["127.0.0.1", "::1"]}
    assert found("no.such.host.invalid", "198.51.100.1", hosts=hosts) == [itself]


def test_where_interfaces_cannot_be_listed_the_way_to_the_swarm_is_enough(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hidden() -> None:
        raise PermissionError

    monkeypatch.setattr(psutil, "net_if_addrs", hidden)
    machine.ways = {"198.51.100.1": "192.0.2.7"}
    assert found("198.51.100.1") == ["192.0.2.7"]


def test_a_change_is_seen_the_next_time(machine: Machine) -> None:
    machine.interfaces = {"wlan0": ["192.0.2.7"]}
    assert found() == found() == ["192.0.2.7"]
    machine.interfaces = {"wlan0": ["198.51.100.9"]}
    assert found() == ["198.51.100.9"]


def test_this_machine_can_be_asked() -> None:
    chosen = advertised(EVERYWHERE, 7, (), [("127.0.0.1", 1), ("::1", 1), ("x" * 70 + ".example", 1)])
    assert 1 <= len(chosen) <= MAX_ADDRESSES
    assert len(set(chosen)) == len(chosen)


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("peer", False),
    ],
)
def test_loopback(host: str, local: bool) -> None:
    assert is_loopback(host) == local
