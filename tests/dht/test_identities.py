"""Ids are proved, and cannot be had from others: who gets into a table, and who takes whose place."""

from __future__ import annotations

import os

from support.dht import KEY, Network, Stranger, address_of, eventually, method_of, protocol_of

from p2pllm.dht import Contact
from p2pllm.dht.exchange import TOKEN_S
from p2pllm.identity import Identity


async def test_who_forges_addresses_cannot_make_a_node_sign_without_end(
    network: Network, stranger: Stranger
) -> None:
    node = await network.node()
    stranger.id = Identity.generate().node_id
    answers = []
    for _ in range(450):
        stranger.token = bytes(8)
        answers.append((await stranger.ask(node, "hello", bytes(96)))[2])
    assert [answer is not None for answer in answers] == [True] * 400 + [False] * 50
    assert (await stranger.ask(node, "hello", bytes(96)))[2] is not None, "who shows to be there is served"


async def test_an_id_takes_a_key_and_a_fresh_signature(network: Network, stranger: Stranger) -> None:
    """Neither somebody else's id, nor a signature made for another question or another asker will do."""
    node, other = await network.node(), await network.node()
    old: list[bytes] = []

    def signed_for(nonce: bytes, asker: bytes, replier: bytes) -> list[bytes]:
        message = b"p2pllm node\0" + nonce + asker + replier
        return [stranger.identity.public_key, stranger.identity.sign(message)]

    own, asker = stranger.identity.node_id, network.identities[node].node_id
    victim = network.identities[other]
    forgeries = [
        (victim.node_id, lambda nonce: signed_for(nonce, asker, victim.node_id)),
        (victim.node_id, lambda nonce: [victim.public_key, signed_for(nonce, asker, victim.node_id)[1]]),
        (own, lambda nonce: signed_for(old[0], asker, own)),
        (own, lambda nonce: signed_for(nonce, victim.node_id, own)),
        (own, lambda nonce: [stranger.identity.public_key]),
        (own, lambda nonce: [b"", b""]),
        (own, lambda nonce: True),
    ]
    old.append(os.urandom(20))
    for stranger.id, forge in forgeries:
        stranger.answer = lambda request, forge=forge: (
            stranger.reply_to(request, forge(request[1:21]))
            if method_of(request) == "hello"
            else stranger.polite(request)
        )
        assert await node.bootstrap([stranger.address]) == 0
    assert node.contacts() == []
    stranger.id, stranger.answer = own, stranger.polite
    assert await node.bootstrap([stranger.address]) == 1


async def test_a_token_is_good_for_one_address_and_one_node(network: Network, stranger: Stranger) -> None:
    one, other = await network.joined(2)
    await stranger.ask(one, "ping")
    assert (await stranger.ask(one, "find_node", KEY, 20))[2] is not None
    assert (await stranger.ask(other, "find_node", KEY, 20))[2] is None


async def test_a_token_is_good_for_a_while_only(network: Network, stranger: Stranger) -> None:
    """Or whoever once had an address could have answers sent to whoever has it now."""
    node = await network.node()
    await stranger.ask(node, "ping")
    token = stranger.token
    network.clock.now += TOKEN_S
    assert (await stranger.ask(node, "find_node", KEY, 20))[2] is not None
    assert stranger.token != token
    network.clock.now += TOKEN_S
    stranger.token = token
    assert (await stranger.ask(node, "find_node", KEY, 20))[2] is None


async def test_a_node_enters_the_table_only_by_proving_its_id(network: Network, stranger: Stranger) -> None:
    node = await network.node()
    await node.put(KEY, network.record(node))
    await stranger.ask(node, "ping")
    await stranger.ask(node, "find_node", KEY, 20)
    await eventually(lambda: len(stranger.asked) == 2)
    assert stranger.asked == ["hello", "hello"], "two tries, and no record is handed over unasked"
    assert node.contacts() == []
    stranger.answer = stranger.polite_but("hello", True)
    await eventually(lambda: not protocol_of(node)._greetings)
    network.clock.now += 1.0
    await stranger.ask(node, "find_node", KEY, 20)
    await eventually(lambda: len(stranger.asked) == 3 and not protocol_of(node)._greetings)
    assert node.contacts() == []
    stranger.answer = stranger.polite
    network.clock.now += 1.0
    await stranger.ask(node, "find_node", KEY, 20)
    await eventually(lambda: node.contacts() == [Contact(stranger.id, *stranger.address)])


async def test_who_passes_proofs_on_does_not_take_an_id_from_its_owner(
    network: Network, stranger: Stranger
) -> None:
    """A stranger in the middle can answer with a proof that its owner made, but not move the id to itself."""
    one, other = await network.joined(2)
    owner = network.identities[other]
    stranger.identity, stranger.id = owner, owner.node_id  # as good as passing every question on
    stranger.answer = stranger.polite
    assert await one.bootstrap([stranger.address]) == 1
    await stranger.ask(one, "ping")
    await stranger.ask(one, "find_node", KEY, 20)
    await eventually(lambda: not protocol_of(one)._greetings)
    assert one.contacts() == [Contact(owner.node_id, *address_of(other))]
    await network.still_works(one, other)
    await other.close()
    await one.put(KEY, network.record(one))
    await stranger.ask(one, "find_node", KEY, 20)
    await eventually(lambda: one.contacts() == [Contact(owner.node_id, *stranger.address)])


async def test_an_id_cannot_be_taken_over_while_its_owner_answers(
    network: Network, stranger: Stranger
) -> None:
    one, other = await network.joined(2)
    stranger.id = network.identities[other].node_id
    stranger.answer = stranger.polite
    await stranger.ask(one, "ping")
    await stranger.ask(one, "find_node", KEY, 20)
    await eventually(lambda: not protocol_of(one)._greetings)
    assert one.contacts() == [Contact(network.identities[other].node_id, *address_of(other))]
    await network.still_works(one, other)
