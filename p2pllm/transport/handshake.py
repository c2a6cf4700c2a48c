"""How two peers prove to each other who they are and that they belong together, sans-IO.

Three flights, so that a dial costs two round trips with TCP's own (and one more for TLS)::

    dialer   → acceptor   hello: version, ticket, public key, nonce     (in the upgrade request)
    acceptor → dialer     reply: public key, nonce, signature
    dialer   → acceptor   proof: signature

Both sign the same transcript under different labels: the swarm, the certificate that the acceptor shows, both
keys and both nonces. So a signature is good for one link between two peers of one swarm, and cannot be
replayed, passed on or reflected; somebody in between who ends the encryption with another certificate has
none to show, even if the dialer was made to expect that certificate.

In a public swarm the ticket is the swarm's id. In a private one it is a proof, made with the swarm's key, for
this dialer, acceptor and certificate, and what is signed ends with another proof, of the transcript. So an
outsider who dials learns that there is a private swarm behind the port, the version, and the certificate,
whose name says nothing; not the swarm, the model or the peer. Two things cannot be helped without another
round trip: the dialer names itself first, to an acceptor that is known by its certificate alone; and without
encryption, whoever listens on the way sees both public keys, and can send the hello again to have the
acceptor's once more.

A refusal is a LinkError whose text the caller sends to the other side.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from p2pllm.errors import LinkError
from p2pllm.identity import Identity, PeerId, peer_id_of, verify
from p2pllm.records import SwarmKey

__all__ = ["NONCE_BYTES", "VERSION", "Acceptor", "Dialer", "Terms"]

VERSION = 2
"""Of the handshake and the frames; peers link only with their own."""

NONCE_BYTES = 32
_TICKET_BYTES = 32
_KEY_BYTES = 32
_SIGNATURE_BYTES = 64
_NO_CERTIFICATE = bytes(32)


@dataclass(frozen=True, slots=True)
class Terms:
    """What both sides must agree on.

    The 20-byte id of the ``swarm``, the SHA-256 of the acceptor's ``certificate`` (empty without encryption)
    and, in a private swarm, its ``secret``.
    """

    swarm: bytes
    certificate: bytes = b""
    secret: SwarmKey | None = None

    def ticket(self, dialer_key: bytes, nonce: bytes, acceptor: PeerId) -> bytes:
        """Return the 32 bytes by which a dialer shows in its hello that it belongs here."""
        if self.secret is None:
            return self.swarm.ljust(_TICKET_BYTES, b"\0")
        return self.secret.proof(self._bind(b"hello", dialer_key, nonce, bytes.fromhex(acceptor)))

    def transcript(self, role: bytes, *parts: bytes) -> bytes:
        """Return what ``role`` signs; the parts have fixed lengths, so no two transcripts read the same."""
        said = self._bind(role, *parts)
        return said if self.secret is None else said + self.secret.proof(said)

    def _bind(self, role: bytes, *parts: bytes) -> bytes:
        certificate = self.certificate or _NO_CERTIFICATE
        return b"".join((b"p2pllm link ", bytes([VERSION]), role, self.swarm, certificate, *parts))


class Dialer:
    """The side that opens the link to ``peer``; ``nonce`` is fresh and random."""

    def __init__(self, identity: Identity, terms: Terms, peer: PeerId, nonce: bytes) -> None:
        self._identity = identity
        self._terms = terms
        self._peer = peer
        self._nonce = nonce

    def hello(self) -> bytes:
        """Return the first flight."""
        key = self._identity.public_key
        return bytes([VERSION]) + self._terms.ticket(key, self._nonce, self._peer) + key + self._nonce

    def prove(self, reply: bytes) -> bytes:
        """Check the acceptor's reply and return the last flight; raises LinkError if it is not ``peer``."""
        key, nonce, signature = _split(reply, _KEY_BYTES, NONCE_BYTES, _SIGNATURE_BYTES)
        if peer_id_of(key) != self._peer:
            raise LinkError(f"this address belongs to peer {peer_id_of(key)[:8]}, not {self._peer[:8]}")
        parts = (self._identity.public_key, key, self._nonce, nonce)
        if not verify(key, self._terms.transcript(b"acceptor", *parts), signature):
            raise LinkError(f"forged signature of peer {self._peer[:8]}")
        return self._identity.sign(self._terms.transcript(b"dialer", *parts))


class Acceptor:
    """The side that is dialled; ``nonce`` is fresh and random."""

    def __init__(self, identity: Identity, terms: Terms, nonce: bytes) -> None:
        self._identity = identity
        self._terms = terms
        self._nonce = nonce
        self._dialer_key = b""
        self._expected = b""
        """What the dialer has to sign."""

    def reply(self, hello: bytes) -> bytes:
        """Return the answer to a dialer's hello; raises LinkError if there can be no link."""
        if hello and hello[0] != VERSION:
            raise LinkError(f"this peer speaks link version {VERSION}: update the older of the two")
        _, ticket, key, nonce = _split(hello, 1, _TICKET_BYTES, _KEY_BYTES, NONCE_BYTES)
        own = self._identity
        if not hmac.compare_digest(ticket, self._terms.ticket(key, nonce, own.peer_id)):
            if self._terms.secret is not None:
                raise LinkError("this swarm is private: pass its key with --swarm-key-file")
            swarm = self._terms.swarm.hex()[:8]
            raise LinkError(f"peer {own.peer_id[:8]} serves another model (swarm {swarm})")
        if key == own.public_key:
            raise LinkError(f"peer {own.peer_id[:8]} dialled itself")
        parts = (key, own.public_key, nonce, self._nonce)
        self._dialer_key = key
        self._expected = self._terms.transcript(b"dialer", *parts)
        return own.public_key + self._nonce + own.sign(self._terms.transcript(b"acceptor", *parts))

    def admit(self, proof: bytes) -> PeerId:
        """Return who the dialer is; raises LinkError if it has not proved it."""
        if not verify(self._dialer_key, self._expected, proof):
            raise LinkError("forged signature of the dialling peer")
        return peer_id_of(self._dialer_key)


def _split(data: bytes, *sizes: int) -> list[bytes]:
    """Cut ``data`` into pieces of exactly these sizes."""
    if len(data) != sum(sizes):
        raise LinkError(f"handshake of {len(data)} bytes instead of {sum(sizes)}")
    pieces = []
    for size in sizes:
        pieces.append(data[:size])
        data = data[size:]
    return pieces
