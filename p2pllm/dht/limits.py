"""How much each source may ask. Sans-IO: the clock's reading is an argument.

Two budgets for who has proved to receive at its address: its own, and its network's (a host, or the /64 of
an IPv6 host), which is enough for hundreds of nodes behind one address. Who has proved nothing draws on a
budget apart: whoever forges the address of an honest node cannot use up what that node needs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

from p2pllm.dht.contacts import Address, network_of

__all__ = ["Limits", "RateLimit"]

ADDRESS_PER_S: Final = 500.0
NETWORK_PER_S: Final = 3000.0
UNPROVEN_PER_S: Final = 1000.0
OFFENCE: Final = 25.0
"""What a request costs that no honest node sends, in requests: most are a signature checked in vain."""

_MAX_SOURCES = 4096


class RateLimit:
    """A token bucket for each source: ``rate`` requests per second, twice as many at once. Bounded."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def allows(self, source: Hashable, now: float) -> bool:
        """Count one request, unless the source has none left."""
        left = self._left(source, now)
        self._buckets[source] = (left - 1 if left >= 1 else left), now
        if len(self._buckets) > _MAX_SOURCES:
            self._buckets.popitem(last=False)
        return left >= 1

    def charge(self, source: Hashable, cost: float, now: float) -> None:
        """Take away what the source has left, up to ``cost``."""
        self._buckets[source] = max(self._left(source, now) - cost, 0.0), now

    def _left(self, source: Hashable, now: float) -> float:
        left, since = self._buckets.pop(source, (2 * self._rate, now))
        return min(left + (now - since) * self._rate, 2 * self._rate)


class Limits:
    """What all sources together may ask of this node."""

    def __init__(self) -> None:
        self._addresses = RateLimit(ADDRESS_PER_S)
        self._networks = RateLimit(NETWORK_PER_S)
        self._unproven = RateLimit(UNPROVEN_PER_S)

    def allows(self, address: Address, now: float, *, proven: bool) -> bool:
        """Count one request; whether to answer it. ``proven``: it came with a valid token."""
        if not proven:
            return self._unproven.allows(network_of(address[0]), now)
        return self._addresses.allows(address, now) and self._networks.allows(network_of(address[0]), now)

    def offended(self, address: Address, now: float) -> None:
        """A proven source sent what no honest node does."""
        self._addresses.charge(address, OFFENCE, now)
        self._networks.charge(network_of(address[0]), OFFENCE, now)
