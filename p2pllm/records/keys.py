"""Where records lie in the DHT."""

from __future__ import annotations

import hashlib

__all__ = ["directory_key", "swarm_id", "swarms_key"]


def swarm_id(fingerprint: str) -> bytes:
    """The 20-byte id of the swarm that serves the model with this fingerprint."""
    return _key(b"swarm", fingerprint.encode())


def directory_key(swarm: bytes) -> bytes:
    """The 20-byte DHT key under which the peers of a swarm publish their peer and metrics records."""
    return _key(b"directory", swarm)


def swarms_key() -> bytes:
    """The 20-byte DHT key of the index of all swarms."""
    return _key(b"swarms")


def _key(purpose: bytes, *parts: bytes) -> bytes:
    return hashlib.sha1(b"\0".join((b"p2pllm", purpose, *parts)), usedforsecurity=False).digest()
