"""Under which addresses other peers can reach this one."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from p2pllm.config import EVERYWHERE, Address, parse_address

__all__ = ["MAX_ADDRESSES", "Listening", "advertised", "is_loopback"]

MAX_ADDRESSES: Final = 4
"""As many as a peer record carries."""

_INSIDE = re.compile(
    r"docker|br-|hassio|nerdctl|podman|cni|flannel|cali|vxlan\.calico|tunl\d|cilium|weave|antrea|ovn|kube"
    r"|nodelocal|veth(?!ernet)|virbr|vnet|vmnet|vmenet|vboxnet|lxc|lxd|incus|mpqemu|waydroid|bridge\d{3}|dummy|ifb"
    r"|vethernet \((wsl|default|nat|docker)|virtualbox|vmware",
    re.IGNORECASE,
)
"""Names of interfaces that lead only to containers and virtual machines on this machine.

Those of Docker, Podman, Kubernetes' networks, libvirt, LXC, Multipass, Apple's and Microsoft's hypervisors,
VirtualBox and VMware. Tunnels between machines (WireGuard, Tailscale, OpenVPN) are not among them.
"""

_ADDRESS_FLAGS = Path("/proc/net/if_inet6")
_PASSING = 0x01 | 0x08 | 0x20 | 0x40  # temporary, failed as a duplicate, deprecated, tentative

_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class Listening:
    """Where a peer can be reached: the URL of its API, and what others run to join its swarm.

    ``api_key`` is for the peer's own chat, empty where the API takes none.
    """

    api_url: str
    join_command: str
    api_key: str = ""


def advertised(
    hosts: Sequence[str], port: int, given: Sequence[str], towards: Sequence[Address]
) -> tuple[Address, ...]:
    """The addresses for the peer record, best first, at most MAX_ADDRESSES.

    What the machine has may change: ask again now and then. Looking up a name in ``towards`` may block for
    seconds.

    Args:
        hosts: what the peer listens on. An address other than those of EVERYWHERE stands for itself.
        given: ``--advertise``; each a host, or host:port where a router maps another port. Wins over
        everything; names are kept, so that whoever dials looks them up.
        towards: addresses of nodes on the way to the swarm; the interface that leads there is the likeliest
        to be reachable.
    """
    if given:
        chosen = [parse_address(text) if _has_port(text) else (text.strip("[]"), port) for text in given]
    else:
        versions = {_ip(host).version for host in hosts if host in EVERYWHERE}
        own = [host for host in hosts if host not in EVERYWHERE]
        local = [*own, *_found(versions, towards)] or ["127.0.0.1" if 4 in versions else "::1"]
        chosen = [(host, port) for host in local]
    return tuple(dict.fromkeys(chosen))[:MAX_ADDRESSES]


def is_loopback(host: str) -> bool:
    """Whether ``host`` is this machine only. A name other than localhost counts as not."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _has_port(text: str) -> bool:
    return text.count(":") == 1 or (text.startswith("[") and "]:" in text)


def _found(versions: Collection[int], towards: Sequence[Address]) -> list[str]:
    """This machine's addresses of these IP versions that others may reach, best first.

    First those from which packets to ``towards`` leave, then others of the same interface, then the rest,
    IPv4 before IPv6 and global before private.
    """
    sources = [source for target in towards for source in _sources(target)]
    # One that no interface admits to has no name that could speak against it.
    interfaces = dict.fromkeys(sources, "") | _interfaces()
    ways = {(interfaces[source], source.version) for source in sources}
    passing = _passing()

    def rank(address: _Ip) -> tuple[int | bool, ...]:
        if address in sources:
            return (False,)
        on_the_way = (interfaces[address], address.version) in ways
        return True, not on_the_way, address.version, not address.is_global

    wanted = [
        address
        for address, interface in interfaces.items()
        if address.version in versions
        and address not in passing
        and not _INSIDE.match(interface)
        and not (address.is_loopback or address.is_link_local)
        and not (address.is_unspecified or address.is_multicast)
    ]
    return [str(address) for address in sorted(wanted, key=rank)]


def _sources(address: Address) -> Iterator[_Ip]:
    """The local addresses, one of each IP version, from which packets to ``address`` leave; sends nothing."""
    try:
        ways = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):  # the latter from names that no resolver takes
        return
    first = {family: target for family, _, _, _, target in reversed(ways)}
    for family, target in sorted(first.items()):  # IPv4 has the lower number everywhere
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)
                yield _ip(probe.getsockname()[0])
        except OSError:
            continue


def _interfaces() -> dict[_Ip, str]:
    """The addresses of all interfaces that are up, by interface name, and the name of each."""
    try:
        states, entries = psutil.net_if_stats(), psutil.net_if_addrs()
    except OSError:  # some sandboxes hide them
        return {}
    return {
        _ip(entry.address): name
        for name in sorted(entries)
        if name in states and states[name].isup
        for entry in entries[name]
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }


def _passing() -> set[_Ip]:
    """IPv6 addresses that will be gone soon, or are not in use yet; none where the system is not Linux."""
    try:
        lines = _ADDRESS_FLAGS.read_text().splitlines()
    except OSError:
        return set()
    entries = [line.split() for line in lines]  # address, index, prefix length, scope, flags, name
    return {
        ipaddress.IPv6Address(bytes.fromhex(entry[0])) for entry in entries if int(entry[4], 16) & _PASSING
    }


def _ip(text: str) -> _Ip:
    return ipaddress.ip_address(text.partition("%")[0])
