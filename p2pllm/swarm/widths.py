"""How many shards the directory of a swarm is cut into: one step at a time, and without a gap. Pure."""

from __future__ import annotations

from typing import Final

from p2pllm.records import MAX_DIRECTORY_BITS

__all__ = ["OVERLAP_S", "Widths", "bits_for"]

OVERLAP_S: Final = 10.0
"""So long everybody uses the shards from before a change, too: not all hear of it at once."""

PEERS_A_SHARD: Final = 16
"""What a shard should have: a page has room for the news of few, and each shard costs its readers one."""


def bits_for(peers: int, bits: int) -> int:
    """Into how many bits to cut the directory of so many peers, when it is cut into ``bits`` now.

    It stays as it is while a shard has between half and one and a half of what it should have.
    """
    while bits < MAX_DIRECTORY_BITS and 2 * peers > 3 * PEERS_A_SHARD * 2**bits:
        bits += 1
    while bits > 0 and 2 * peers < PEERS_A_SHARD * 2**bits:
        bits -= 1
    return bits


class Widths:
    """The bits to publish and to read by now; 0 until somebody has said better."""

    def __init__(self) -> None:
        self.bits = 0
        self._until: dict[int, float] = {}  # when earlier ones end

    def follow(self, bits: int, now: float) -> None:
        """Use ``bits`` from now on, and those from before for a while longer."""
        if bits != self.bits:
            self._until[self.bits] = now + OVERLAP_S
            self._until.pop(bits, None)
            self.bits = bits

    def current(self, now: float) -> tuple[int, ...]:
        """All bits that are in use, the newest first."""
        self._until = {bits: until for bits, until in self._until.items() if now < until}
        return self.bits, *self._until
