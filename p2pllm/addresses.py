"""Under which addresses other peers can reach this one."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from p2pllm.config import Address, parse_address

__all__ = ["MAX_ADDRESSES", "Listening", "advertised", "is_loopback"]

EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104
"""What one listens on to listen on all addresses."""

MAX_ADDRESSES = 4
"""As many as a peer record carries."""

_BRIDGES = re.compile(r"docker|br-|veth|virbr|cni|flannel|podman|cali|lxc|lxd|kube|vmnet|vboxnet")


@dataclass(frozen=True, slots=True)
class Listening:
    """Where a peer can be reached: the URL of its API, and what others run to join its swarm."""

    api_url: str
    join_command: str


def advertised(host: str, port: int, given: Sequence[str], towards: Sequence[Address]) -> tuple[Address, ...]:
    """The addresses for the peer record, best first. Resolves names, so it may block.

    Args:
        host: what the peer listens on; when it is one address, that is the answer.
        given: ``--advertise``; each a host, or host:port where a router maps another port. Wins over
        everything. towards: bootstrap addresses; the interface that leads there is the likeliest to be
        reachable.
    """
    if given:
        return tuple(parse_address(text) if _has_port(text) else (text, port) for text in given)[
            :MAX_ADDRESSES
        ]
    if host not in EVERYWHERE:
        return ((host, port),)
    local = [_source(address) for address in towards] + _interfaces()
    chosen = [address for address in dict.fromkeys(local) if address is not None and not is_loopback(address)]
    return tuple((address, port) for address in chosen[:MAX_ADDRESSES]) or (("127.0.0.1", port),)


def is_loopback(host: str) -> bool:
    """Whether ``host`` is this machine only. A name other than localhost counts as not."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _has_port(text: str) -> bool:
    return text.count(":") == 1 or (text.startswith("[") and "]:" in text)


def _source(address: Address) -> str | None:
    """The local address from which packets to ``address`` would leave; sends nothing."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(
            *address, family=socket.AF_INET, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _interfaces() -> list[str]:
    """IPv4 addresses of interfaces that are up, container bridges and link-local ones left out."""
    states = psutil.net_if_stats()
    return [
        entry.address
        for name, entries in sorted(psutil.net_if_addrs().items())
        if name in states and states[name].isup and not _BRIDGES.match(name)
        for entry in entries
        if entry.family == socket.AF_INET and not ipaddress.ip_address(entry.address).is_link_local
    ]
