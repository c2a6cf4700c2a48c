"""The prefix cache: blocks of finished sessions, kept for those that begin with the same tokens.

A block is found by what it and all before it hold: the owner names it by a hash that covers both. Stages
after the first never see tokens, so a name counts for its owner only, and for the very layers it was made in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["HASH_BYTES", "Node", "NodeKey", "PrefixCache", "names_in"]

HASH_BYTES = 8
"""Bytes of a block's name."""

NodeKey = tuple[str, int, int, bytes]
"""Owner, layers [start, end), and the name of the block."""


@dataclass(slots=True, eq=False)
class Node:
    """16 tokens of some layers: the block that the layers of each window have them in, and which these are.

    ``pins`` sessions use it.
    """

    key: NodeKey
    blocks: Mapping[int | None, int]
    layers: Mapping[int | None, Sequence[int]]
    pins: int = 0


class PrefixCache:
    """Nodes by their names, the longest unused first. Those that are pinned stay."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[NodeKey, Node] = OrderedDict()

    def __contains__(self, key: NodeKey) -> bool:
        return key in self._nodes

    def unused(self) -> Iterator[Node]:
        """Nodes that nobody uses, the longest unused first. They may be removed on the way."""
        return (node for node in tuple(self._nodes.values()) if node.pins == 0)

    def match(self, keys: Iterable[NodeKey]) -> list[Node]:
        """The nodes of the first ``keys``, up to one that is not here."""
        nodes = []
        for key in keys:
            node = self._nodes.get(key)
            if node is None:
                break
            nodes.append(node)
        return nodes

    def pin(self, nodes: Iterable[Node]) -> int:
        """Keep nodes until they are let go of again; returns how many nobody else had kept."""
        first = 0
        for node in nodes:
            node.pins += 1
            first += node.pins == 1
        return first

    def unpin(self, nodes: Sequence[Node]) -> int:
        """Let go of nodes in a row, of which the first was used last; returns how many nobody keeps now."""
        last = 0
        for node in reversed(nodes):
            node.pins -= 1
            last += node.pins == 0
            self._nodes.move_to_end(node.key)
        return last

    def add(self, node: Node) -> None:
        """Keep a new node, as the last used."""
        self._nodes[node.key] = node

    def remove(self, node: Node) -> None:
        """Forget a node that nobody uses."""
        del self._nodes[node.key]


def names_in(prefix: bytes) -> list[bytes]:
    """The names that ``prefix`` is made of."""
    return [prefix[at : at + HASH_BYTES] for at in range(0, len(prefix), HASH_BYTES)]
