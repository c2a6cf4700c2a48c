"""Which records to pass on to whom: a flood in which every record crosses a link once. Pure.

A record is known by its signature. Who has sent it, or was sent it, is not sent it again; what was seen is
remembered long after it has died out. As in any rumour mongering (Demers et al., 1987) whatever a flood
misses must come another way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Final

from p2pllm.scheduling import PeerId
from p2pllm.transport import MAX_GOSSIP_RECORDS

__all__ = ["Flood"]

MAX_SEEN: Final = 8192
MAX_PENDING: Final = 1024

RECORDS_PER_S: Final = 400.0
"""What one sender may bring; a swarm of 256 peers at work stays far below."""

BURST: Final = 800.0
MUTE_S: Final = 60.0
MAX_SENDERS: Final = 256
_NAME_BYTES = 64


class Flood:
    """Records in, batches out. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._had_by: OrderedDict[bytes, set[PeerId]] = OrderedDict()  # by record, oldest first
        self._pending: OrderedDict[bytes, bytes] = OrderedDict()  # name and bytes of what is to be passed on
        self._budgets: OrderedDict[PeerId, tuple[float, float]] = OrderedDict()  # (records left, at)

    @property
    def idle(self) -> bool:
        """Whether nothing waits to be passed on."""
        return not self._pending

    def hear(self, sender: PeerId, raw: bytes, now: float) -> bool:
        """Whether a record that ``sender`` brings deserves a look: not seen before, and not over its limit.

        It counts as seen only once it is told to `spread`, or a forgery could keep out what it resembles.
        """
        left, at = self._budgets.pop(sender, (BURST, now))
        left = min(BURST, left + max(0.0, now - at) * RECORDS_PER_S)
        self._budgets[sender] = (left - 1, max(now, at)) if left >= 1 else (left, max(now, at))
        if len(self._budgets) > MAX_SENDERS:
            self._budgets.popitem(last=False)
        had_by = self._had_by.get(raw[-_NAME_BYTES:])
        if had_by is not None:
            had_by.add(sender)
            return False
        return left >= 1

    def mute(self, sender: PeerId, now: float) -> None:
        """Hear nothing from ``sender`` for a while: it passes on what it cannot have checked."""
        self._budgets[sender] = (0.0, now + MUTE_S)

    def spread(self, raw: bytes, sender: PeerId | None = None) -> None:
        """Pass on a verified record, ``sender``'s or one's own, to all who do not have it."""
        name = raw[-_NAME_BYTES:]
        had_by = self._had_by.setdefault(name, set())
        if sender is not None:
            had_by.add(sender)
        self._pending[name] = raw
        if len(self._had_by) > MAX_SEEN:
            self._pending.pop(self._had_by.popitem(last=False)[0], None)
        if len(self._pending) > MAX_PENDING:
            self._pending.popitem(last=False)

    def batches(self, neighbours: Collection[PeerId]) -> dict[PeerId, tuple[bytes, ...]]:
        """What to send to each neighbour now; what is too much for one message is left for the next time."""
        batches: dict[PeerId, list[bytes]] = {peer: [] for peer in neighbours}
        for name, raw in list(self._pending.items()):
            had_by = self._had_by[name]
            for peer, batch in batches.items():
                if peer not in had_by and len(batch) < MAX_GOSSIP_RECORDS:
                    batch.append(raw)
                    had_by.add(peer)
            if had_by.issuperset(neighbours):
                del self._pending[name]
        return {peer: tuple(batch) for peer, batch in batches.items() if batch}
