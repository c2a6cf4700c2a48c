"""The sockets of a node: one for each address family, on the same port."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Sequence
from typing import Final

from p2pllm.config import format_addresses
from p2pllm.dht.contacts import FAMILIES, Family, is_usable
from p2pllm.errors import PortTakenError, UsageError

__all__ = ["bind", "resolve"]

BUFFER_BYTES: Final = 2**20
"""Room for what arrives while the process is busy; the system may give less."""

_TRIES = 16
_NO_SUCH_FAMILY = {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT}


async def bind(hosts: Sequence[str], port: int) -> dict[Family, socket.socket]:
    """UDP sockets bound to ``hosts``, at most one of each family, all on ``port`` (0: one that is free).

    The host ``::`` is left out where the machine has no IPv6 and there is another. UsageError if a host is
    none of this machine's, PortTakenError if somebody else has the port.
    """
    local: dict[Family, str] = {}
    for host in hosts:
        found = await _local(host, port)
        family = next((family for family, _ in found if family not in local), None)
        if family is None:
            raise UsageError(f"cannot listen on {host}: take one IPv4 and one IPv6 address for --host")
        local[family] = next(numeric for other, numeric in found if other == family)
    for _ in range(_TRIES - 1):
        with contextlib.suppress(PortTakenError):
            return _bind(local, port)
        if port:
            break
    return _bind(local, port)


def _bind(hosts: dict[Family, str], port: int) -> dict[Family, socket.socket]:
    with contextlib.ExitStack() as opened:
        bound: dict[Family, socket.socket] = {}
        for family, host in hosts.items():
            try:
                one = opened.enter_context(socket.socket(family, socket.SOCK_DGRAM))
                one.setblocking(False)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
                if family == socket.AF_INET6:
                    one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                one.bind((host, port))
            except OSError as error:
                if host == "::" and len(hosts) > 1 and error.errno in _NO_SUCH_FAMILY:
                    continue
                raise _refusal(host, port, error) from error
            bound[family] = one
            port = one.getsockname()[1]
        opened.pop_all()
        return bound


async def resolve(name: str, family: Family) -> list[str]:
    """The hosts of one family that a name stands for, asked of the system off the loop; none if it fails."""
    if ":" in name and not is_usable(name):
        return []  # the system would undress an IPv4 host in IPv6 clothes
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            name, None, family=family, type=socket.SOCK_DGRAM
        )
    except (OSError, UnicodeError):
        return []
    hosts = dict.fromkeys(str(address[0]) for *_, address in found)
    return [host for host in hosts if is_usable(host)]


async def _local(host: str, port: int) -> list[tuple[Family, str]]:
    """The numeric forms of a host to listen on, IPv4 first."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:
        raise _refusal(host, port, error) from error
    numeric = [(family, str(address[0])) for family, *_, address in found if family in FAMILIES]
    return sorted(numeric, key=lambda pair: FAMILIES.index(pair[0]))


def _refusal(host: str, port: int, error: OSError | UnicodeError) -> UsageError:
    taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
    reason = error.strerror if isinstance(error, OSError) else "it is not a name"
    where = format_addresses([(host, port)])
    return (PortTakenError if taken else UsageError)(
        f"cannot listen on {where} (UDP), {reason}: choose another --host or --port"
    )
