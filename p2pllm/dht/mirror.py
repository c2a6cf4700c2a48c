"""What this node has read of other nodes' records, kept up to date by reading only what is new."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from p2pllm.dht.protocol import RegistryProtocol
from p2pllm.dht.storage import Records
from p2pllm.dht.wire import Address, Contact
from p2pllm.errors import RecordError
from p2pllm.records import Record

__all__ = ["Mirror"]

MAX_PAGES: Final = 512
"""Pages read from one node at a time."""

_MAX_PLACES = 1024


class Mirror:
    """Copies of the records under the keys that this node reads, merged from several replicas.

    Kept apart from what others store here, so that no replica can use up their room.
    """

    def __init__(self, protocol: RegistryProtocol, clock: Callable[[], float]) -> None:
        self._protocol = protocol
        self._clock = clock
        self._records = Records()
        # How far each replica of each key has been read: the instance of the node, and its version.
        self._read: OrderedDict[tuple[bytes, Address], tuple[bytes, int]] = OrderedDict()

    def live(self, key: bytes) -> list[Record]:
        """The records known under ``key`` that have not expired."""
        return self._records.live(key, self._clock())

    async def refresh(self, key: bytes, replica: Contact) -> bool:
        """Read what is new under ``key`` from one replica; whether it answered to the end.

        Records that are not valid are left out; the rest of what the replica says still counts. Pages read
        before a failure or cancellation are kept, and the next refresh goes on from there.
        """
        place = key, replica.address
        for _ in range(MAX_PAGES):
            instance, version = self._read.get(place, (b"", 0))
            page = await self._protocol.fetch(replica, key, version)
            if page is None:
                return False
            if page.instance != instance and version > 0:
                self._remember(place, page.instance, 0)  # it has restarted: from the beginning
                continue
            for life, raw in page.items:
                try:
                    self._records.accept(key, raw, life, source=replica.host, now=self._clock())
                except RecordError:
                    continue
            self._remember(place, page.instance, page.version)
            if not page.more:
                return True
            if page.version == version:
                return False
        return False

    def _remember(self, place: tuple[bytes, Address], instance: bytes, version: int) -> None:
        self._read[place] = instance, version
        self._read.move_to_end(place)
        if len(self._read) > _MAX_PLACES:
            self._read.popitem(last=False)
