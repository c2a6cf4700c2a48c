"""Private swarms: who has not got the swarm's key can neither find it, nor read it, nor link with it."""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from p2pllm.errors import RecordError, UsageError

__all__ = ["SwarmKey", "read_swarm_key"]

MIN_KEY_BYTES: Final = 16
MAX_KEY_BYTES: Final = 4096
_NONCE_BYTES = 12


class SwarmKey:
    """The secret that the members of a private swarm share."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        derive = HKDF(algorithm=SHA256(), length=32, salt=None, info=b"p2pllm records").derive
        self._cipher = ChaCha20Poly1305(derive(key))

    def swarm_id(self, fingerprint: str) -> bytes:
        """The 20-byte id of this private swarm of a model: HMAC-SHA-256 of its fingerprint, cut."""
        return self._mac(b"p2pllm swarm", fingerprint.encode())[:20]

    def proof(self, transcript: bytes) -> bytes:
        """32 bytes that only a member can make for what was said on a link."""
        return self._mac(b"p2pllm link", transcript)

    def hide(self, body: bytes, context: bytes) -> bytes:
        """Seal a record's body; ``context`` is what it must come with to be opened again."""
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, body, context)

    def reveal(self, hidden: bytes, context: bytes) -> bytes:
        """The inverse of ``hide``; RecordError if it was not sealed with this key and context."""
        try:
            return self._cipher.decrypt(hidden[:_NONCE_BYTES], hidden[_NONCE_BYTES:], context)
        except (InvalidTag, ValueError):
            raise RecordError("a record is not sealed with this swarm's key") from None

    def _mac(self, purpose: bytes, message: bytes) -> bytes:
        return hmac.digest(self._key, purpose + b"\0" + message, hashlib.sha256)


def read_swarm_key(path: Path) -> SwarmKey:
    """The key in a file, white space around it left out. UsageError if there is none that is good enough."""
    try:
        with path.open("rb") as file:
            key = file.read(MAX_KEY_BYTES + 1).strip()
    except OSError as error:
        raise UsageError(f"cannot read --swarm-key-file {path} ({error.strerror})") from error
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        raise UsageError(
            f"the key in {path} has {len(key)} bytes, it takes {MIN_KEY_BYTES} to {MAX_KEY_BYTES}: make one "
            "with openssl rand -hex 32"
        )
    return SwarmKey(key)
