"""Private swarms: who has not got the swarm's key can neither find it, nor read it, nor link with it."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
import sys
from pathlib import Path
from typing import Final

import structlog
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESSIV
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from p2pllm.errors import RecordError, UsageError

__all__ = ["SwarmKey", "read_swarm_key"]

MIN_KEY_BYTES: Final = 16
MAX_KEY_BYTES: Final = 4096

log = structlog.get_logger()


class SwarmKey:
    """The secret that the members of a private swarm share."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        derive = HKDF(algorithm=SHA256(), length=64, salt=None, info=b"p2pllm records").derive
        # It needs no nonce: its tag is one (RFC 5297), so that no number of records wears the key out.
        self._cipher = AESSIV(derive(key))

    def swarm_id(self, fingerprint: str) -> bytes:
        """The 20-byte id of this private swarm of a model: HMAC-SHA-256 of its fingerprint, cut."""
        return self._mac(b"p2pllm swarm", fingerprint.encode())[:20]

    def proof(self, transcript: bytes) -> bytes:
        """32 bytes that only a member can make for what was said on a link."""
        return self._mac(b"p2pllm link", transcript)

    def hide(self, body: bytes, context: bytes) -> bytes:
        """Seal a record's body; ``context`` is what it must come with to be opened again."""
        return self._cipher.encrypt(body, [context])

    def reveal(self, hidden: bytes, context: bytes) -> bytes:
        """The inverse of ``hide``; RecordError if it was not sealed with this key and context."""
        try:
            return self._cipher.decrypt(hidden, [context])
        except InvalidTag:
            raise RecordError("a record is not sealed with this swarm's key") from None

    def _mac(self, purpose: bytes, message: bytes) -> bytes:
        return hmac.digest(self._key, purpose + b"\0" + message, hashlib.sha256)


def read_swarm_key(path: Path) -> SwarmKey:
    """The key in a file, white space around it left out. UsageError if there is none that is good enough.

    That others can read the file is worth a warning only: secrets mounted into containers often are so.
    """
    try:
        with path.open("rb") as file:
            key = file.read(MAX_KEY_BYTES + 1).strip()
            mode = os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise UsageError(f"cannot read --swarm-key-file {path} ({error.strerror})") from error
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        raise UsageError(
            f"the key in {path} has {len(key)} bytes, it takes {MIN_KEY_BYTES} to {MAX_KEY_BYTES}: make one "
            "with openssl rand -hex 32"
        )
    if sys.platform != "win32" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        log.warning("swarm_key_open_to_others", path=str(path), mode=f"{stat.S_IMODE(mode):04o}")
    return SwarmKey(key)
