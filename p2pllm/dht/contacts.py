"""Where nodes are: addresses of both families, contacts, and the compact form in which they travel.

The compact form is BEP 5's and BEP 32's: 20 bytes of id, 4 (IPv4) or 16 (IPv6) of host, 2 of port, one
contact after the other. So a host that is not one, or a port that cannot be, has no way to be said.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, TypeAlias

__all__ = [
    "FAMILIES",
    "ID_BYTES",
    "Address",
    "Contact",
    "Family",
    "family_of",
    "is_usable",
    "network_of",
    "pack_contacts",
    "parse_contacts",
]

ID_BYTES: Final = 20

Address: TypeAlias = tuple[str, int]
"""A host and a port, as the socket gives them."""

Family: TypeAlias = socket.AddressFamily
FAMILIES: Final = (socket.AF_INET, socket.AF_INET6)

_HOST_BYTES: Final = {socket.AF_INET: 4, socket.AF_INET6: 16}
_PORT_BYTES = 2
_SITE_BYTES = 8  # of an IPv6 address: whoever has one host of such a network has them all


@dataclass(frozen=True, slots=True, order=True)
class Contact:
    """A node id and where to reach it. Stands in for the package's `Node`, which takes anything for an id.

    ``long_id`` is the id as a number, as the package's buckets want it, ``address`` where to send datagrams.
    Both are asked for so often that they are made once.
    """

    id: bytes
    host: str
    port: int
    long_id: int = field(init=False, repr=False, compare=False)
    address: Address = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "long_id", int.from_bytes(self.id))
        object.__setattr__(self, "address", (self.host, self.port))


def family_of(host: str) -> Family:
    """The family of a numeric host."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def network_of(host: str) -> str | bytes:
    """What limits go by: an IPv4 host, or the /64 that an IPv6 host is in."""
    return socket.inet_pton(socket.AF_INET6, host)[:_SITE_BYTES] if ":" in host else host


@lru_cache(4096)
def is_usable(host: str, *, loopback: bool = True) -> bool:
    """Whether datagrams to a numeric host reach one machine, the same from everywhere.

    Not so are link-local hosts and whatever else names an interface, which mean nothing elsewhere, and IPv4
    hosts in IPv6 clothes, which would be a second name for each of them. ``loopback`` says whether that
    counts.
    """
    try:
        host_address = ipaddress.ip_address(host)
    except ValueError:
        return False
    if "%" in host:
        return False
    if host_address.is_loopback:
        return loopback
    if host_address.is_multicast or host_address.packed[0] == 0:  # "this network"; all of IPv4 in IPv6
        return False
    if isinstance(host_address, ipaddress.IPv6Address):
        return not (host_address.is_link_local or host_address.is_site_local)
    return not host_address.is_reserved


def pack_contacts(contacts: Iterable[Contact]) -> bytes:
    """The compact form of contacts of one family."""
    return b"".join(
        contact.id + socket.inet_pton(family_of(contact.host), contact.host) + contact.port.to_bytes(2)
        for contact in contacts
    )


def parse_contacts(packed: bytes, *, named_by: str) -> list[Contact]:
    """The contacts that the host ``named_by`` told us of, all of its family.

    Left out are those whom to ask is impossible or harmful; of what is not whole, the rest is ignored.
    """
    family = family_of(named_by)
    # Somebody else's machine cannot know what listens on ours.
    loopback = is_usable(named_by) and not is_usable(named_by, loopback=False)
    size = ID_BYTES + _HOST_BYTES[family] + _PORT_BYTES
    contacts: list[Contact] = []
    for start in range(0, len(packed) - size + 1, size):
        item = packed[start : start + size]
        host = socket.inet_ntop(family, item[ID_BYTES:-_PORT_BYTES])
        port = int.from_bytes(item[-_PORT_BYTES:])
        if port and is_usable(host, loopback=loopback):
            contacts.append(Contact(item[:ID_BYTES], host, port))
    return contacts
