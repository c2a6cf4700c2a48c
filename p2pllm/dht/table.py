"""Whom this node knows: the package's routing table, made exact and robust.

What differs from the package: the k closest are the k closest (ties by id), a bucket owns both ends of its
range, no id appears at two addresses nor an address under two ids, nodes that are silent are not named to
anybody, and nothing is sent from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import cast

from kademlia.node import Node
from kademlia.routing import KBucket, RoutingTable

from p2pllm.dht.contacts import Contact

__all__ = ["ContactTable", "by_distance", "distance"]


def distance(contact: Contact, target: bytes) -> tuple[int, bytes]:
    """The key that sorts contacts by nearness to a 20-byte target; ids decide ties, so it is total."""
    return contact.long_id ^ int.from_bytes(target), contact.id


def by_distance(contacts: Iterable[Contact], target: bytes) -> list[Contact]:
    """Contacts by nearness to ``target``, as ``distance`` has it: two ids are equally near only if equal."""
    origin = int.from_bytes(target)
    return sorted(contacts, key=lambda contact: contact.long_id ^ origin)


class ContactTable(RoutingTable):  # type: ignore[misc]  # the package ships no types
    """Contacts in Kademlia buckets. ``usable`` says whether a contact may be asked and named right now."""

    def __init__(self, protocol: object, ksize: int, node: Node, usable: Callable[[Contact], bool]) -> None:
        super().__init__(protocol, ksize, node)
        self._usable = usable

    def __iter__(self) -> Iterator[Contact]:
        for bucket in self.buckets:
            yield from cast(list[Contact], bucket.get_nodes())

    def __len__(self) -> int:
        return sum(len(bucket) for bucket in self.buckets)

    def get(self, node_id: bytes) -> Contact | None:
        """The contact with this id, silent or not."""
        return cast(Contact | None, self._bucket_of(int.from_bytes(node_id))[node_id])

    def nearest(self, target: bytes, count: int) -> list[Contact]:
        """The usable contacts nearest to ``target``, at most ``count``."""
        return list(islice(filter(self._usable, by_distance(self, target)), count))

    def has_room(self, node_id: bytes) -> bool:
        """Whether a contact with this id would get in, or get its new address in."""
        long_id = int.from_bytes(node_id)
        bucket = self._bucket_of(long_id)
        return len(bucket) < self.ksize or node_id in bucket.nodes or bucket.has_in_range(self.node)

    def holds(self, contact: Contact) -> bool:
        """Whether exactly this contact is here, be it as a replacement in a full bucket."""
        bucket = self._bucket_of(contact.long_id)
        return contact in (bucket[contact.id], bucket.replacement_nodes.get(contact.id))

    def add_contact(self, node: Contact) -> bool:
        """Add a contact that has proved to answer at its address; it displaces what else we hold of either.

        False if its bucket is full: then it waits there as a replacement.
        """
        if node.id == self.node.id:
            return False
        for other in [*self, *self._replacements()]:
            if (other.id == node.id) != (other.address == node.address):
                self.remove_contact(other)
        while not self._bucket_of(node.long_id).add_node(node):
            if not self._bucket_of(node.long_id).has_in_range(self.node):
                return False
            self.split_bucket(self.get_bucket_for(node))
        return True

    def get_bucket_for(self, node: Contact) -> int:
        """The index of the bucket whose range, both ends included, holds the contact's id."""
        return next(index for index, bucket in enumerate(self.buckets) if node.long_id <= bucket.range[1])

    def _bucket_of(self, long_id: int) -> KBucket:
        for bucket in self.buckets:
            if long_id <= bucket.range[1]:
                return bucket
        raise ValueError("a node id has 160 bits")

    def _replacements(self) -> Iterator[Contact]:
        for bucket in self.buckets:
            yield from cast("list[Contact]", list(bucket.replacement_nodes.values()))
