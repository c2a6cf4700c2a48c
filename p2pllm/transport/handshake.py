"""How two peers prove to each other who they are when a link opens, sans-IO.

Three flights, so that a dial costs two round trips with TCP's own::

    dialer   → acceptor   hello: version, swarm, public key, nonce      (in the upgrade request)
    acceptor → dialer     reply: public key, nonce, signature
    dialer   → acceptor   proof: signature

Both sign the same transcript under different labels: the swarm, both keys and both nonces. So a signature is
good for one link between two peers of one swarm, and cannot be replayed, passed on or reflected. A refusal is
a LinkError whose text the caller sends to the other side.
"""

from __future__ import annotations

from dataclasses import dataclass

from p2pllm.errors import LinkError
from p2pllm.identity import Identity, PeerId, peer_id_of, verify

__all__ = ["NONCE_BYTES", "VERSION", "Acceptor", "Dialer"]

VERSION = 1
"""Of the handshake and the frames; peers link only with their own."""

NONCE_BYTES = 32
_SWARM_BYTES = 20
_KEY_BYTES = 32
_SIGNATURE_BYTES = 64


@dataclass(frozen=True, slots=True)
class _Transcript:
    swarm: bytes
    dialer_key: bytes
    acceptor_key: bytes
    dialer_nonce: bytes
    acceptor_nonce: bytes

    def signed_by(self, role: bytes) -> bytes:
        """Return what this role signs; the parts have fixed lengths, so no two transcripts read the same."""
        parts = (self.swarm, self.dialer_key, self.acceptor_key, self.dialer_nonce, self.acceptor_nonce)
        return b"p2pllm link " + bytes([VERSION]) + role + b"".join(parts)


class Dialer:
    """The side that opens the link to ``peer``; ``nonce`` is fresh and random."""

    def __init__(self, identity: Identity, swarm: bytes, peer: PeerId, nonce: bytes) -> None:
        self._identity = identity
        self._swarm = swarm
        self._peer = peer
        self._nonce = nonce

    def hello(self) -> bytes:
        """Return the first flight."""
        return bytes([VERSION]) + self._swarm + self._identity.public_key + self._nonce

    def prove(self, reply: bytes) -> bytes:
        """Check the acceptor's reply and return the last flight; raises LinkError if it is not ``peer``."""
        key, nonce, signature = _split(reply, _KEY_BYTES, NONCE_BYTES, _SIGNATURE_BYTES)
        if peer_id_of(key) != self._peer:
            raise LinkError(f"this address belongs to peer {peer_id_of(key)[:8]}, not {self._peer[:8]}")
        transcript = _Transcript(self._swarm, self._identity.public_key, key, self._nonce, nonce)
        if not verify(key, transcript.signed_by(b"acceptor"), signature):
            raise LinkError(f"forged signature of peer {self._peer[:8]}")
        return self._identity.sign(transcript.signed_by(b"dialer"))


class Acceptor:
    """The side that is dialled; ``nonce`` is fresh and random."""

    def __init__(self, identity: Identity, swarm: bytes, nonce: bytes) -> None:
        self._identity = identity
        self._swarm = swarm
        self._nonce = nonce
        self._transcript: _Transcript | None = None

    def reply(self, hello: bytes) -> bytes:
        """Return the answer to a dialer's hello; raises LinkError if there can be no link."""
        if hello and hello[0] != VERSION:
            raise LinkError(
                f"peer {self._identity.peer_id[:8]} speaks link version {VERSION}: update the older"
            )
        _, swarm, key, nonce = _split(hello, 1, _SWARM_BYTES, _KEY_BYTES, NONCE_BYTES)
        if swarm != self._swarm:
            raise LinkError(
                f"peer {self._identity.peer_id[:8]} serves another model (swarm {self._swarm.hex()[:8]})"
            )
        if key == self._identity.public_key:
            raise LinkError(f"peer {self._identity.peer_id[:8]} dialled itself")
        self._transcript = _Transcript(swarm, key, self._identity.public_key, nonce, self._nonce)
        signature = self._identity.sign(self._transcript.signed_by(b"acceptor"))
        return self._identity.public_key + self._nonce + signature

    def admit(self, proof: bytes) -> PeerId:
        """Return who the dialer is; raises LinkError if it has not proved it."""
        if self._transcript is None or not verify(
            self._transcript.dialer_key, self._transcript.signed_by(b"dialer"), proof
        ):
            raise LinkError("forged signature of the dialling peer")
        return peer_id_of(self._transcript.dialer_key)


def _split(data: bytes, *sizes: int) -> list[bytes]:
    """Cut ``data`` into pieces of exactly these sizes."""
    if len(data) != sum(sizes):
        raise LinkError(f"handshake of {len(data)} bytes instead of {sum(sizes)}")
    pieces = []
    for size in sizes:
        pieces.append(data[:size])
        data = data[size:]
    return pieces
