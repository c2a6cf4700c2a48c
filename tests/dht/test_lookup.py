"""Lookups in a made-up network, where the right answer is known by brute force."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest

from p2pllm.dht.contacts import Contact
from p2pllm.dht.lookup import MAX_ASKED, Answer, Lookup, Replicas, find_nearest


def nearest(contacts: set[Contact], target: bytes, count: int) -> list[Contact]:
    return sorted(contacts, key=lambda c: int.from_bytes(c.id) ^ int.from_bytes(target))[:count]


@dataclass
class Web:
    """Nodes that each know the 10 nearest to them and 10 others; those in ``dead`` do not answer."""

    rng: random.Random
    contacts: list[Contact] = field(default_factory=list)
    dead: set[Contact] = field(default_factory=set)
    knows: dict[Contact, set[Contact]] = field(default_factory=dict)
    asked: list[Contact] = field(default_factory=list)

    @classmethod
    def of(cls, size: int, seed: int) -> Web:
        web = cls(random.Random(seed))
        web.contacts = [
            Contact(web.rng.randbytes(20), f"192.0.2.{n % 250 + 1}", 1000 + n) for n in range(size)
        ]
        for one in web.contacts:
            others = set(web.contacts) - {one}
            web.knows[one] = {*nearest(others, one.id, 10), *web.rng.sample(sorted(others), 10)}
        return web

    def answer(self, asked: Contact, target: bytes) -> Answer | None:
        """Whoever is at the address answers, as itself."""
        self.asked.append(asked)
        real = next((one for one in self.contacts if one.address == asked.address), None)
        return None if real is None or real in self.dead else (real, nearest(self.knows[real], target, 20))

    async def find(self, target: bytes, start: list[Contact]) -> list[Contact]:
        async def ask(contact: Contact) -> Answer | None:
            await asyncio.sleep(0)
            return self.answer(contact, target)

        return await find_nearest(Lookup(target, 8, start), ask)


@pytest.mark.parametrize("seed", range(5))
async def test_the_nearest_of_200_are_found_from_anywhere(seed: int) -> None:
    web = Web.of(200, seed)
    target = web.rng.randbytes(20)
    found = await web.find(target, web.rng.sample(web.contacts, 3))
    assert found == nearest(set(web.contacts), target, 8)
    assert len(web.asked) <= MAX_ASKED


@pytest.mark.parametrize("seed", range(5))
async def test_the_nearest_living_are_found_when_a_quarter_is_dead(seed: int) -> None:
    web = Web.of(200, seed)
    start = web.rng.sample(web.contacts, 6)
    web.dead = set(web.rng.sample(web.contacts, 50)) - set(start[:2])
    target = web.rng.randbytes(20)
    assert await web.find(target, start) == nearest(set(web.contacts) - web.dead, target, 8)


async def test_one_who_names_made_up_neighbours_cannot_use_up_the_search() -> None:
    web = Web.of(100, seed=1)
    target = web.rng.randbytes(20)
    liar = nearest(set(web.contacts), target, 20)[-1]
    fakes = {Contact(target[:18] + bytes([n, 1]), "198.51.100.1", 1 + n) for n in range(20)}
    web.knows[liar] = fakes
    web.dead = fakes
    found = await web.find(target, [liar, *web.contacts[:3]])
    assert found == nearest(set(web.contacts), target, 8)
    assert 3 <= sum(one in fakes for one in web.asked) <= 3 + 4, "after three duds only what was under way"


@pytest.mark.parametrize("seed", range(5))
async def test_one_who_names_true_addresses_under_far_ids_cannot_hide_who_is_there(seed: int) -> None:
    web = Web.of(100, seed)
    target = web.rng.randbytes(20)
    liar, *others = web.contacts
    far = bytes(byte ^ 0xFF for byte in target)
    hidden = nearest(set(others), target, 20)
    web.knows[liar] = {Contact(far[:19] + bytes([n]), *one.address) for n, one in enumerate(hidden)}
    found = await web.find(target, [liar, *web.rng.sample(others, 3)])
    assert found == nearest(set(web.contacts), target, 8)


def test_two_addresses_for_one_id_do_not_stop_the_search() -> None:
    """The package compares nodes that have the same distance, and raises TypeError from then on."""
    twins = [Contact(b"\1" * 20, "192.0.2.1", port) for port in (1, 2)]
    lookup = Lookup(bytes(20), 8, twins)
    assert {lookup.next(), lookup.next()} == set(twins)
    assert lookup.next() is None


def test_who_really_answers_counts_not_who_was_said_to() -> None:
    said = Contact(b"\1" * 20, "192.0.2.1", 1000)
    real = Contact(b"\2" * 20, *said.address)
    lookup = Lookup(bytes(20), 8, [said])
    assert lookup.next() == said
    lookup.answered((real, []))
    assert lookup.result() == [real]


def test_an_address_is_asked_once_whatever_ids_it_is_given() -> None:
    lookup = Lookup(bytes(20), 8, [Contact(bytes([n] * 20), "192.0.2.1", 1000) for n in range(1, 9)])
    assert lookup.next() is not None
    assert lookup.next() is None


def test_a_search_ends_after_a_bounded_number_of_questions() -> None:
    lookup = Lookup(bytes(20), 8, [Contact(b"\xff" * 20, "192.0.2.1", 1)])
    asked = 0
    while (contact := lookup.next()) is not None:
        asked += 1
        closer = (contact.long_id - asked).to_bytes(20)
        named = [Contact(closer, "192.0.2.1", 1000 * asked + n) for n in range(20)]
        lookup.answered((contact, named))
    assert asked == MAX_ASKED


def test_who_has_answered_just_now_counts_and_is_asked_only_if_very_near() -> None:
    contacts = [Contact(bytes(19) + bytes([n]), "192.0.2.1", n) for n in range(1, 9)]
    lookup = Lookup(bytes(20), 6, contacts, is_fresh=lambda contact: contact.port != 5)
    asked = [lookup.next() for _ in range(4)]
    assert asked == [*contacts[:3], contacts[4]], "the three nearest, and one of whom nothing is known"
    assert lookup.next() is None
    assert lookup.result() == [*contacts[:4], *contacts[5:7]]
    lookup.answered((contacts[4], []))
    assert lookup.result() == contacts[:6]
    lookup.failed(contacts[0])
    assert lookup.next() == contacts[3], "who is now one of the three"
    assert lookup.result() == contacts[1:7]


async def test_no_barrier_a_slow_node_delays_only_itself() -> None:
    """While one node keeps its answer to itself, all the others are asked and answer."""
    web = Web.of(60, seed=3)
    target = web.rng.randbytes(20)
    slow, *rest = nearest(set(web.contacts), target, 9)
    others_found = asyncio.Event()

    async def ask(contact: Contact) -> Answer | None:
        if contact == slow:
            await others_found.wait()
            return None
        answer = web.answer(contact, target)
        if set(rest) <= set(web.asked):
            others_found.set()
        return answer

    assert await find_nearest(Lookup(target, 8, [slow, *web.contacts[:3]]), ask) == rest


async def test_a_cancelled_search_leaves_no_question_behind() -> None:
    asked = asyncio.Event()

    async def ask(_: Contact) -> Answer | None:
        asked.set()
        await asyncio.Event().wait()
        return None

    search = asyncio.create_task(find_nearest(Lookup(bytes(20), 8, Web.of(12, 0).contacts), ask))
    await asked.wait()
    search.cancel()
    await asyncio.wait([search])
    assert search.cancelled()
    assert asyncio.all_tasks() == {asyncio.current_task()}


TWO, THREE, NINE = (Contact(bytes(19) + bytes([n]), "192.0.2.1", n) for n in (2, 3, 9))


def test_replicas_are_remembered_for_a_while_and_make_room_for_nearer_nodes() -> None:
    replicas = Replicas(2)
    key = bytes(20)
    assert replicas.get(key, 0.0) is None
    replicas.found(key, [THREE, NINE], 0.0, 20.0)
    replicas.arrived(TWO)
    assert replicas.get(key, 19.9) == [TWO, THREE]
    moved = Contact(TWO.id, "192.0.2.1", 22)
    replicas.arrived(moved)
    assert replicas.get(key, 19.9) == [moved, THREE]
    assert replicas.get(key, 20.0) is None


def test_replicas_that_fail_are_left_out_and_a_lookup_is_due_soon_or_at_once_when_half_are_gone() -> None:
    replicas = Replicas(4)
    key = bytes(20)
    four = Contact(bytes(19) + b"\4", "192.0.2.1", 4)
    replicas.found(key, [TWO, THREE, four, NINE], 0.0, 20.0)
    replicas.failed(key, THREE, 5.0)
    assert replicas.get(key, 5.9) == [TWO, four, NINE]
    assert replicas.get(key, 6.0) is None
    replicas.failed(key, NINE, 5.5)
    assert replicas.get(key, 5.5) is None
    replicas.failed(key, NINE, 5.5)
    replicas.found(key, [TWO], 10.0, 1.0)
    assert replicas.get(key, 10.9) == [TWO]
    assert replicas.get(key, 11.0) is None
    replicas.found(key, [TWO], 20.0, 20.0)
    replicas.clear()
    assert replicas.get(key, 20.0) is None
