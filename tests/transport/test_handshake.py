"""The handshake alone: who is let in, by bytes only."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pllm.errors import LinkError
from p2pllm.identity import Identity, verify
from p2pllm.records import SwarmKey
from p2pllm.transport.handshake import NONCE_BYTES, Acceptor, Dialer, Terms

SWARM = bytes(range(20))
CERTIFICATE = bytes(range(32, 64))
KEY = SwarmKey(b"the key of the swarm")
PUBLIC = Terms(SWARM, CERTIFICATE)
PRIVATE = Terms(SWARM, CERTIFICATE, KEY)
ALICE, BOB, EVE = (Identity.from_seed(bytes([number]) * 32) for number in range(3))

either = pytest.mark.parametrize("terms", [PUBLIC, PRIVATE], ids=["public", "private"])


def pair(dialer=ALICE, acceptor=BOB, *, wanted=BOB, terms=(PUBLIC, PUBLIC), nonces=(b"a", b"b")):
    return (
        Dialer(dialer, terms[0], wanted.peer_id, nonces[0] * NONCE_BYTES),
        Acceptor(acceptor, terms[1], nonces[1] * NONCE_BYTES),
    )


@either
def test_both_sides_learn_who_the_other_is(terms):
    dialer, acceptor = pair(terms=(terms, terms))
    assert acceptor.admit(dialer.prove(acceptor.reply(dialer.hello()))) == ALICE.peer_id


@either
def test_flights_have_fixed_sizes(terms):
    dialer, acceptor = pair(terms=(terms, terms))
    hello = dialer.hello()
    reply = acceptor.reply(hello)
    assert (len(hello), len(reply), len(dialer.prove(reply))) == (97, 128, 64)


@either
@given(byte=st.integers(0, 96), bit=st.integers(0, 7))
def test_one_flipped_bit_of_the_hello_lets_nobody_in(terms, byte, bit):
    dialer, acceptor = pair(terms=(terms, terms))
    hello = bytearray(dialer.hello())
    hello[byte] ^= 1 << bit
    with pytest.raises(LinkError):
        acceptor.admit(dialer.prove(acceptor.reply(bytes(hello))))


@either
@given(byte=st.integers(0, 127), bit=st.integers(0, 7))
def test_one_flipped_bit_of_the_reply_is_noticed_by_the_dialer(terms, byte, bit):
    dialer, acceptor = pair(terms=(terms, terms))
    reply = bytearray(acceptor.reply(dialer.hello()))
    reply[byte] ^= 1 << bit
    with pytest.raises(LinkError):
        dialer.prove(bytes(reply))


@either
@given(noise=st.binary(max_size=200))
def test_noise_is_refused_at_every_step(terms, noise):
    dialer, acceptor = pair(terms=(terms, terms))
    with pytest.raises(LinkError):
        acceptor.reply(noise)
    with pytest.raises(LinkError):
        dialer.prove(noise)
    acceptor.reply(dialer.hello())
    with pytest.raises(LinkError):
        acceptor.admit(noise)


def test_a_proof_before_a_hello_is_refused():
    _, acceptor = pair()
    with pytest.raises(LinkError):
        acceptor.admit(bytes(64))


def test_a_proof_holds_for_its_own_link_only():
    def proof(change=PUBLIC, **others):
        dialer, acceptor = pair(terms=(change, change), **others)
        return dialer.prove(acceptor.reply(dialer.hello()))

    # Same dialer, and one thing different each time.
    recorded = {
        "as it was": proof(),
        "another nonce of the dialer": proof(nonces=(b"x", b"b")),
        "another nonce of the acceptor": proof(nonces=(b"a", b"x")),
        "another acceptor": proof(acceptor=EVE, wanted=EVE),
        "another swarm": proof(replace(PUBLIC, swarm=bytes(20))),
        "another certificate": proof(replace(PUBLIC, certificate=bytes(range(32)))),
        "no certificate": proof(replace(PUBLIC, certificate=b"")),
        "a private swarm": proof(PRIVATE),
        "another private swarm": proof(replace(PRIVATE, secret=SwarmKey(b"another swarm's key"))),
    }
    assert all(one != other for one, other in itertools.combinations(recorded.values(), 2))
    for name, signature in recorded.items():
        dialer, acceptor = pair()
        acceptor.reply(dialer.hello())
        if name == "as it was":
            assert acceptor.admit(signature) == ALICE.peer_id
        else:
            with pytest.raises(LinkError):
                acceptor.admit(signature)


def test_the_acceptors_own_signature_cannot_be_sent_back_as_proof():
    dialer, acceptor = pair()
    with pytest.raises(LinkError):
        acceptor.admit(acceptor.reply(dialer.hello())[-64:])


def test_someone_between_two_peers_cannot_pass_as_either():
    """Eve forwards what Alice says to Bob; Bob's answer names Bob, who is not whom Alice dialled."""
    dialer, acceptor = pair(wanted=EVE)
    with pytest.raises(LinkError, match=f"belongs to peer {BOB.peer_id[:8]}"):
        dialer.prove(acceptor.reply(dialer.hello()))


def test_someone_between_with_a_certificate_of_their_own_is_noticed():
    """Alice was made to expect Eve's certificate; what Bob signs names the one that he shows."""
    dialer, acceptor = pair(terms=(replace(PUBLIC, certificate=bytes(range(32))), PUBLIC))
    reply = acceptor.reply(dialer.hello())
    with pytest.raises(LinkError, match="forged signature"):
        dialer.prove(reply)


def test_an_outsider_of_a_private_swarm_is_told_that_it_is_one_and_nothing_else():
    outsiders = [
        PUBLIC,
        replace(PUBLIC, swarm=bytes(20)),
        replace(PRIVATE, secret=SwarmKey(b"another swarm's key")),
        replace(PRIVATE, swarm=bytes(20)),
    ]
    for terms in outsiders:
        dialer, acceptor = pair(terms=(terms, PRIVATE))
        with pytest.raises(LinkError) as refusal:
            acceptor.reply(dialer.hello())
        assert str(refusal.value) == "this swarm is private: pass its key with --swarm-key-file"
    # Nor does another version, or none at all, bring out more.
    for hello in (b"\x01" + bytes(96), b"", bytes(97)):
        _, acceptor = pair(terms=(PRIVATE, PRIVATE))
        with pytest.raises(LinkError) as refusal:
            acceptor.reply(hello)
        assert BOB.peer_id[:8] not in str(refusal.value)
        assert SWARM.hex()[:8] not in str(refusal.value)


def test_a_hello_of_a_member_says_nothing_of_its_swarm_and_opens_no_other_peer():
    dialer, _ = pair(terms=(PRIVATE, PRIVATE))
    hello = dialer.hello()
    assert SWARM not in hello
    for acceptor in (
        Acceptor(EVE, PRIVATE, bytes(32)),
        Acceptor(BOB, replace(PRIVATE, certificate=b""), bytes(32)),
    ):
        with pytest.raises(LinkError, match="private"):
            acceptor.reply(hello)


def test_who_repeats_a_members_hello_cannot_finish():
    """Eve has seen Alice's hello, gets Bob's answer to it, and signs with what she has."""
    hello = pair(terms=(PRIVATE, PRIVATE))[0].hello()
    _, acceptor = pair(terms=(PRIVATE, PRIVATE), nonces=(b"a", b"c"))
    reply = acceptor.reply(hello)
    parts = (ALICE.public_key, BOB.public_key, b"a" * NONCE_BYTES, b"c" * NONCE_BYTES)
    # Bob's signature is over more than Eve can know, so not even whether it is his.
    assert verify(BOB.public_key, PRIVATE.transcript(b"acceptor", *parts), reply[-64:])
    assert not verify(BOB.public_key, PUBLIC.transcript(b"acceptor", *parts), reply[-64:])
    with pytest.raises(LinkError):
        acceptor.admit(EVE.sign(PUBLIC.transcript(b"dialer", *parts)))


def test_even_a_known_peer_needs_the_key_of_the_swarm():
    """Alice has lost the key but repeats her own hello from when she had it."""
    dialer, acceptor = pair(terms=(PRIVATE, PRIVATE))
    acceptor.reply(dialer.hello())
    parts = (ALICE.public_key, BOB.public_key, b"a" * NONCE_BYTES, b"b" * NONCE_BYTES)
    with pytest.raises(LinkError):
        acceptor.admit(ALICE.sign(PUBLIC.transcript(b"dialer", *parts)))


def test_members_of_other_public_swarms_are_told_so():
    dialer, acceptor = pair(terms=(replace(PUBLIC, swarm=bytes(20)), PUBLIC))
    with pytest.raises(
        LinkError, match=rf"{BOB.peer_id[:8]} serves another model \(swarm {SWARM.hex()[:8]}\)"
    ):
        acceptor.reply(dialer.hello())
    dialer, acceptor = pair(terms=(PRIVATE, PUBLIC))
    with pytest.raises(LinkError, match="serves another model"):
        acceptor.reply(dialer.hello())
