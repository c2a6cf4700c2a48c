"""Proof that a node is who it says: its id is the hash of a key, and it signs with that key. Sans-IO.

What is signed names both sides and the asker's nonce, so it is good for one question of one asker. It says
nothing about *where* the signer is: a stranger can pass question and answer on. Therefore an id that is
known at one address moves to another only when the old one is silent, or its owner's signed record says so.
"""

from __future__ import annotations

import hashlib
from typing import Final

from p2pllm.identity import Identity, verify

__all__ = ["PADDING", "is_proven", "prove"]

PADDING: Final = bytes(96)
"""Travels with the question, or the answer would be longer: who asks need not have proved anything yet."""

_CONTEXT = b"p2pllm node\0"


def prove(identity: Identity, nonce: bytes, asker: bytes) -> list[object]:
    """The answer of the node with this identity to the node ``asker`` (id of 20 bytes)."""
    return [identity.public_key, identity.sign(_CONTEXT + nonce + asker + identity.node_id)]


def is_proven(answer: object, nonce: bytes, asker: bytes, replier: bytes) -> bool:
    """Whether ``answer``, whatever it is, proves that it comes from the node with the id ``replier``."""
    match answer:
        case [bytes(public_key), bytes(signature)]:
            if hashlib.sha1(public_key, usedforsecurity=False).digest() == replier:
                return verify(public_key, _CONTEXT + nonce + asker + replier, signature)
    return False
