"""Which addresses a peer advertises: what it is told, what it listens on, or the machine's own, never a
bridge.
"""

from __future__ import annotations

import socket
from typing import Any, NamedTuple

import psutil
import pytest

from p2pllm.addresses import MAX_ADDRESSES, advertised, is_loopback


class Entry(NamedTuple):
    family: int
    address: str


class State(NamedTuple):
    isup: bool


def machine(monkeypatch: pytest.MonkeyPatch, interfaces: dict[str, str], down: tuple[str, ...] = ()) -> None:
    """Give this machine other interfaces."""
    entries: dict[str, Any] = {
        name: [Entry(socket.AF_PACKET, "00:00:00:00:00:00"), Entry(socket.AF_INET, address)]
        for name, address in interfaces.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: entries)
    monkeypatch.setattr(
        psutil, "net_if_stats", lambda: {name: State(name not in down) for name in interfaces}
    )


def test_one_address_to_listen_on_is_the_answer() -> None:
    assert advertised("127.0.0.1", 7, (), ()) == (("127.0.0.1", 7),)


def test_what_the_user_says_wins() -> None:
    given = ("example.org", "203.0.113.5:9", "[2001:db8::1]:8", "2001:db8::2")
    assert advertised("0.0.0.0", 7, given, (("127.0.0.1", 1),)) == (
        ("example.org", 7),
        ("203.0.113.5", 9),
        ("2001:db8::1", 8),
        ("2001:db8::2", 7),
    )
    assert len(advertised("0.0.0.0", 7, [f"h{n}" for n in range(9)], ())) == MAX_ADDRESSES


def test_bridges_link_local_and_sleeping_interfaces_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(
        monkeypatch,
        {
            "br-1f2e": "172.18.0.1",
            "docker0": "172.17.0.1",
            "eth0": "192.0.2.7",
            "lo": "127.0.0.1",
            "usb0": "169.254.3.3",
            "veth12": "172.19.0.1",
            "wlan0": "198.51.100.9",
            "wlan1": "198.51.100.10",
        },
        down=("wlan1",),
    )
    # The way to a bootstrap node on this very machine tells nothing.
    assert advertised("0.0.0.0", 7, (), (("127.0.0.1", 1),)) == (("192.0.2.7", 7), ("198.51.100.9", 7))


def test_a_machine_without_a_network_still_has_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, {"lo": "127.0.0.1", "docker0": "172.17.0.1"})
    assert advertised("0.0.0.0", 7, (), (("no.such.host.invalid", 1),)) == (("127.0.0.1", 7),)


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
