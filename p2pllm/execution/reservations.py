"""Who has which blocks of the KV cache: sessions by reservation, the prefix cache until there is need of
them.

Layers that see equally far share a table of blocks. Those with a window give back what has fallen out of it.
The outputs that a session keeps count as one more layer that sees everything.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from p2pllm.errors import BusyError, SessionError
from p2pllm.execution.blocks import BLOCK_TOKENS, BlockPool, blocks_for
from p2pllm.execution.kv import Copy, Tables
from p2pllm.execution.prefix import Node, NodeKey, PrefixCache

__all__ = ["Reservation", "Reservations"]

_AHEAD_TOKENS = 256
_SLACK_TOKENS = 256
"""Tokens past its window that a session of a layer with one may have: for chunks, and for going back."""


@dataclass(slots=True, eq=False)
class Reservation:
    """The blocks of a session of layers [start, end), and of its outputs where it keeps these.

    The first ``shared`` blocks of the tables are those of ``nodes``, and never written to.
    """

    owner: str
    start: int
    end: int
    layers: dict[int | None, tuple[int, ...]]
    tables: Tables
    outputs: int | None = None
    """What stands for its outputs among the numbers of layers."""
    nodes: list[Node] = field(default_factory=list)
    shared: int = 0

    @property
    def all_layers(self) -> list[int]:
        """Of all windows."""
        return [layer for layers in self.layers.values() for layer in layers]

    @property
    def room(self) -> int:
        """Tokens that its tables have blocks for."""
        return min(len(table) for table in self.tables.values()) * BLOCK_TOKENS

    def key(self, name: bytes) -> NodeKey:
        """The full name of one of its blocks."""
        return self.owner, self.start, self.end, name


class Reservations:
    """All blocks there are, and who has them. For the event loop's thread."""

    def __init__(self) -> None:
        self.pool = BlockPool()
        self.cached = 0
        """Blocks that only the prefix cache has."""
        self.windows: dict[int, int | None] = {}
        """How far back each layer sees; None, or no entry, is all the way."""
        self._prefixes = PrefixCache()

    @property
    def free(self) -> int:
        """Blocks that can be had: free ones, and those that only the prefix cache has."""
        return self.pool.free + self.cached

    def open(
        self,
        start: int,
        end: int,
        tokens: int,
        owner: str,
        names: Sequence[bytes],
        *,
        outputs: int | None = None,
    ) -> Reservation:
        """Reserve blocks for ``tokens`` tokens of layers [start, end), the first from the prefix cache.

        ``outputs`` is what stands for the outputs among the numbers of layers, if they are kept. Raises
        `BusyError`, changing nothing, if there are too few.
        """
        layers: dict[int | None, tuple[int, ...]] = {}
        for layer in range(start, end):
            window = self.windows.get(layer)
            layers[window] = (*layers.get(window, ()), layer)
        if outputs is not None:
            layers[None] = (*layers.get(None, ()), outputs)
        made = Reservation(owner, start, end, layers, {}, outputs)
        most = blocks_for(tokens)
        made.nodes = self._prefixes.match(made.key(name) for name in names[:most])
        made.shared = len(made.nodes)
        made.tables = {
            window: np.array([node.blocks[window] for node in made.nodes], dtype=np.int64)
            for window in layers
        }
        cost = self.pool.cost(made.all_layers)
        self.cached -= cost * self._prefixes.pin(made.nodes)
        try:
            self.extend(made, tokens, at_once=0)
        except BusyError:
            self.cached += cost * self._prefixes.unpin(made.nodes)
            raise
        return made

    def make_place(
        self, reservation: Reservation, position: int, end: int, *, settled: int, most: int
    ) -> list[Copy]:
        """See to it that a session can write tokens [position, end); returns what must be copied before.

        No work that it still waits for begins before ``settled``, and it will never have more than ``most``
        tokens. Raises `SessionError` if what precedes ``position`` is not kept any more, and `BusyError` if
        there are too few blocks.
        """
        if end > reservation.room:
            self.leave_behind(reservation, settled)
            try:  # some way ahead while there is room
                self.extend(reservation, min(end + _AHEAD_TOKENS, most), at_once=end)
            except BusyError:
                self.extend(reservation, end, at_once=end)
        return self.go_to(reservation, position)

    def extend(self, reservation: Reservation, tokens: int, *, at_once: int) -> None:
        """Have blocks for ``tokens`` tokens, of layers with windows only as many as they need at a time.

        These have all of ``at_once`` tokens. Raises `BusyError`, changing nothing, if there are too few.
        """
        more = {}
        for window, table in reservation.tables.items():
            most = tokens if window is None else max(at_once, min(tokens, window + _SLACK_TOKENS))
            more[window] = max(0, blocks_for(most) - len(table))
        layers = reservation.layers
        self._make_room(sum(count * self.pool.cost(layers[window]) for window, count in more.items()))
        reservation.tables = {
            window: np.append(table, self._take(reservation, window, more[window]))
            for window, table in reservation.tables.items()
        }

    def leave_behind(self, reservation: Reservation, position: int) -> None:
        """Give back what no token from ``position`` on sees any more, but for some slack."""
        for window, table in reservation.tables.items():
            if window is not None:
                passed = max(0, position - window - _SLACK_TOKENS) // BLOCK_TOKENS
                old = table[reservation.shared : passed]
                if (old >= 0).any():
                    self.pool.give(reservation.layers[window], old[old >= 0])
                    kept = table.copy()
                    kept[reservation.shared : passed] = -1
                    reservation.tables = {**reservation.tables, window: kept}

    def go_to(self, reservation: Reservation, position: int) -> list[Copy]:
        """Be ready to write from ``position`` on, where others' blocks would be written to in own copies.

        Returns what must be copied before. Raises `SessionError` if what precedes ``position`` is not kept
        any more, and `BusyError` if there are too few blocks; then nothing has changed.
        """
        if _is_lost(reservation, position):
            raise SessionError(f"what precedes position {position} is out of a window, and not kept any more")
        kept = position // BLOCK_TOKENS
        if kept >= reservation.shared:
            return []
        count = reservation.shared - kept
        self._make_room(count * self.pool.cost(reservation.all_layers))
        copies: list[Copy] = []
        tables = dict(reservation.tables)
        for window, table in reservation.tables.items():
            layers = reservation.layers[window]
            own = self.pool.take(layers, count)
            tables[window] = np.concatenate([table[:kept], own, table[reservation.shared :]])
            shared = table[kept : reservation.shared]
            copies += [(layers, int(old), int(new)) for old, new in zip(shared, own, strict=True)]
        # The nodes stay pinned: the copy is made later, and until then nobody may write there.
        reservation.tables, reservation.shared = tables, kept
        return copies

    def take_back(self, reservation: Reservation, position: int) -> int:
        """Let a session go on at ``position``, or before it; returns where, once none of its work is left.

        That is where its own blocks begin, if what it needs has fallen out of a window.
        """
        if not _is_lost(reservation, position):
            return position
        kept = reservation.shared
        for window, table in reservation.tables.items():
            if window is not None:
                own = table[kept:]
                self.pool.give(reservation.layers[window], own[own >= 0].tolist())
                reservation.tables = {**reservation.tables, window: table[:kept]}
        return min(position, kept * BLOCK_TOKENS)

    def close(self, reservation: Reservation, names: Sequence[bytes], tokens: int) -> None:
        """Put all blocks back, but for those that ``names`` name, which are kept for others.

        Of the session ``tokens`` tokens are good; blocks after them are not kept.
        """
        cost = self.pool.cost(reservation.all_layers)
        kept = reservation.shared
        self.cached += cost * self._prefixes.unpin(reservation.nodes)
        made = []
        full = min(len(names), tokens // BLOCK_TOKENS)
        spare: dict[int | None, list[int]] = {window: [] for window in reservation.tables}
        for index in range(reservation.shared, full):
            key = reservation.key(names[index])
            blocks = {window: int(table[index]) for window, table in reservation.tables.items()}
            if min(blocks.values()) < 0:
                break
            if key in self._prefixes:
                for window, block in blocks.items():
                    spare[window].append(block)
            else:
                made.append(Node(key, blocks, reservation.layers))
            kept = index + 1
        for window, table in reservation.tables.items():
            rest = table[kept:]
            self.pool.give(reservation.layers[window], [*spare[window], *rest[rest >= 0].tolist()])
        for node in reversed(made):  # the first is the last to go: without it the others are of no use
            self._prefixes.add(node)
        self.cached += cost * len(made)
        self._trim()

    def resize(self, blocks: int, layers: int) -> None:
        """Have ``blocks`` in all from now on, see `BlockPool`; nobody but the prefix cache loses any."""
        self.pool.resize(blocks, layers)
        self._trim()

    def forget(self, layers: Collection[int]) -> None:
        """Free what the prefix cache has of any of these layers, which no session uses now."""
        for node in self._prefixes.unused():
            _, start, end, _ = node.key
            if any(start <= layer < end for layer in layers):
                self._evict(node)
        for layer in layers:
            self.windows.pop(layer, None)

    def _take(self, reservation: Reservation, window: int | None, count: int) -> NDArray[np.int64]:
        table = reservation.tables[window]
        after = int(table[-1]) if len(table) else None
        return self.pool.take(reservation.layers[window], count, after=after)

    def _make_room(self, blocks: int) -> None:
        if blocks > self.free:
            raise BusyError(
                f"KV cache is full: {blocks} blocks wanted, {max(0, self.free)} of {self.pool.total} free"
            )
        self._trim(blocks)

    def _trim(self, blocks: int = 0) -> None:
        """Have so many blocks free, or at least none too many taken, as far as the prefix cache allows."""
        if self.pool.free < blocks:
            for node in self._prefixes.unused():
                self._evict(node)
                if self.pool.free >= blocks:
                    break

    def _evict(self, node: Node) -> None:
        self._prefixes.remove(node)
        for window, block in node.blocks.items():
            self.pool.give(node.layers[window], [block])
            self.cached -= self.pool.cost(node.layers[window])


def _is_lost(reservation: Reservation, position: int) -> bool:
    """Whether a session that goes on at ``position`` would look at, or write, what has left a window."""
    for window, table in reservation.tables.items():
        first = 0 if window is None else max(0, position - window + 1) // BLOCK_TOKENS
        if (table[first:] < 0).any():
            return True
    return False
