"""The routing table: nearest is nearest, by brute force; ids and addresses are never mixed up."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from kademlia.node import Node

from p2pllm.dht.contacts import Contact
from p2pllm.dht.table import ContactTable

OWN = bytes(20)


def made(silent: frozenset[Contact] = frozenset(), ksize: int = 20) -> ContactTable:
    return ContactTable(None, ksize, Node(OWN), lambda contact: contact not in silent)


def contact(number: int, node_id: bytes) -> Contact:
    return Contact(node_id, f"192.0.2.{number % 250 + 1}", 1000 + number)


def xor(a: bytes, b: bytes) -> int:
    return int.from_bytes(a) ^ int.from_bytes(b)


@settings(deadline=None, max_examples=30)
@given(st.integers(), st.integers(1, 64), st.integers(1, 25))
def test_the_nearest_are_the_nearest_usable(seed: int, size: int, count: int) -> None:
    rng = random.Random(seed)
    contacts = [contact(number, rng.randbytes(20)) for number in range(size)]
    silent = frozenset(rng.sample(contacts, size // 4))
    table = made(silent, ksize=64)  # room for all
    for one in contacts:
        assert table.add_contact(one)
    target = rng.randbytes(20)
    expected = sorted(set(contacts) - silent, key=lambda one: xor(one.id, target))[:count]
    assert table.nearest(target, count) == expected
    assert len(table) == size


def test_the_id_in_the_middle_of_a_range_is_found_and_removed() -> None:
    """The package puts 2**159 in one bucket when it splits, and looks for it in the other."""
    table = made(ksize=2)
    middle = contact(0, (2**159).to_bytes(20))
    others = [contact(number, number.to_bytes(20)) for number in range(1, 3)]
    for one in (middle, *others):
        table.add_contact(one)
    assert table.get(middle.id) == middle
    table.remove_contact(middle)
    assert table.get(middle.id) is None
    assert middle not in list(table)


def test_the_largest_and_the_smallest_id_have_a_place() -> None:
    table = made(ksize=2)
    contacts = [contact(n, value.to_bytes(20)) for n, value in enumerate((1, 2**160 - 1, 2**160 - 2, 2))]
    for one in contacts:
        table.add_contact(one)
    assert set(table) == set(contacts)


def test_an_id_has_one_address_and_an_address_one_id() -> None:
    table = made()
    old = Contact(b"\1" * 20, "192.0.2.1", 1000)
    moved = Contact(old.id, "192.0.2.1", 2000)
    successor = Contact(b"\2" * 20, *moved.address)
    table.add_contact(old)
    table.add_contact(moved)
    assert list(table) == [moved]
    table.add_contact(successor)
    assert list(table) == [successor]


def test_a_node_is_not_in_its_own_table() -> None:
    table = made()
    assert not table.add_contact(Contact(OWN, "192.0.2.1", 1000))
    assert len(table) == 0


def test_a_full_bucket_far_away_keeps_its_contacts_and_lets_newcomers_wait() -> None:
    table = made(ksize=4)
    far = [contact(n, bytes([0x90 + n]) + bytes(19)) for n in range(6)]
    added = [table.add_contact(one) for one in far]
    near = contact(9, b"\1" + bytes(19))
    assert table.add_contact(near)
    assert added == [True] * 4 + [False] * 2
    assert set(table) == {*far[:4], near}
    assert all(table.holds(one) for one in far)
    table.remove_contact(far[0])
    assert len(set(table) & set(far)) == 4, "one that waited takes the free place"


def test_near_contacts_split_buckets_without_end_of_room() -> None:
    table = made(ksize=2)
    contacts = [contact(n, (1 << n).to_bytes(20)) for n in range(160)]
    assert all(table.add_contact(one) for one in contacts)
    assert set(table) == set(contacts)
