"""The handshake alone: who is let in, by bytes only."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pllm.errors import LinkError
from p2pllm.identity import Identity
from p2pllm.transport.handshake import NONCE_BYTES, Acceptor, Dialer

SWARM = bytes(range(20))
ALICE, BOB, EVE = (Identity.from_seed(bytes([number]) * 32) for number in range(3))


def pair(dialer=ALICE, acceptor=BOB, *, wanted=BOB, swarms=(SWARM, SWARM), nonces=(b"a", b"b")):
    return (
        Dialer(dialer, swarms[0], wanted.peer_id, nonces[0] * NONCE_BYTES),
        Acceptor(acceptor, swarms[1], nonces[1] * NONCE_BYTES),
    )


def test_both_sides_learn_who_the_other_is():
    dialer, acceptor = pair()
    assert acceptor.admit(dialer.prove(acceptor.reply(dialer.hello()))) == ALICE.peer_id


def test_flights_have_fixed_sizes():
    dialer, acceptor = pair()
    hello = dialer.hello()
    reply = acceptor.reply(hello)
    assert (len(hello), len(reply), len(dialer.prove(reply))) == (85, 128, 64)


@given(st.integers(0, 84), st.integers(0, 7))
def test_one_flipped_bit_of_the_hello_lets_nobody_in(byte, bit):
    dialer, acceptor = pair()
    hello = bytearray(dialer.hello())
    hello[byte] ^= 1 << bit
    with pytest.raises(LinkError):
        acceptor.admit(dialer.prove(acceptor.reply(bytes(hello))))


@given(st.integers(0, 127), st.integers(0, 7))
def test_one_flipped_bit_of_the_reply_is_noticed_by_the_dialer(byte, bit):
    dialer, acceptor = pair()
    reply = bytearray(acceptor.reply(dialer.hello()))
    reply[byte] ^= 1 << bit
    with pytest.raises(LinkError):
        dialer.prove(bytes(reply))


@given(st.binary(max_size=200))
def test_noise_is_refused_at_every_step(noise):
    dialer, acceptor = pair()
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


def test_a_proof_holds_for_its_own_nonces_and_peers_only():
    def proof(**change):
        dialer, acceptor = pair(**change)
        return dialer.prove(acceptor.reply(dialer.hello()))

    # Same dialer, same acceptor, and one thing different each time.
    recorded = {
        "as it was": proof(),
        "another nonce of the dialer": proof(nonces=(b"x", b"b")),
        "another nonce of the acceptor": proof(nonces=(b"a", b"x")),
        "another acceptor": proof(acceptor=EVE, wanted=EVE),
        "another swarm": proof(swarms=(bytes(20), bytes(20))),
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
