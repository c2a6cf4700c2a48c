"""Where records lie in the DHT: 20-byte keys, each for one purpose of one swarm.

The directory of a swarm is cut into ``2**bits`` shards by the first bits of the peer id, so that a shard
holds the records of some 16 peers whatever the size of the swarm; the leader's claim says how many bits it
has now.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Final

__all__ = [
    "MAX_DIRECTORY_BITS",
    "MAX_PLAN_PARTS",
    "SWARM_SHARDS",
    "directory_key",
    "directory_keys",
    "is_plan_key",
    "leader_key",
    "plan_key",
    "swarm_id",
    "swarms_key",
    "swarms_keys",
]

MAX_DIRECTORY_BITS: Final = 8
"""Shards are not cut smaller than this: 256 of them serve 4096 peers."""

MAX_PLAN_PARTS: Final = 256
"""Records that one plan may be cut into: as many as a byte tells apart."""

SWARM_SHARDS: Final = 4
"""Keys among which the index of all swarms is shared out."""


def swarm_id(fingerprint: str) -> bytes:
    """The 20-byte id of the public swarm that serves the model with this fingerprint."""
    return _key(b"swarm", fingerprint.encode())


def directory_key(swarm: bytes, node_id: bytes, bits: int) -> bytes:
    """The key of the shard of a directory of ``2**bits`` shards to which a 20-byte node id belongs."""
    return _shard_key(swarm, bits, int.from_bytes(node_id[:2]) >> (16 - bits))


def directory_keys(swarm: bytes, bits: int) -> list[bytes]:
    """The keys of all shards of a directory of ``2**bits``, in order of ids."""
    return [_shard_key(swarm, bits, index) for index in range(2**bits)]


@lru_cache(256)
def leader_key(swarm: bytes) -> bytes:
    """The key under which whoever leads the swarm, or wants to, claims it."""
    return _key(b"leader", swarm)


def plan_key(swarm: bytes, part: int) -> bytes:
    """The key of one part of the swarm's plan.

    Only the first byte tells the parts of a plan apart, which is enough to spread them over the DHT.
    """
    first = _plan_key(swarm)
    return bytes([first[0] ^ part]) + first[1:]


def is_plan_key(swarm: bytes, key: bytes) -> bool:
    """Whether ``key``, 20 bytes, is that of some part of the swarm's plan."""
    return key[1:] == _plan_key(swarm)[1:]


def swarms_key(swarm: bytes) -> bytes:
    """The key of the index of all swarms under which this one is listed."""
    return _key(b"swarms", bytes([swarm[0] % SWARM_SHARDS]))


def swarms_keys() -> list[bytes]:
    """All keys of the index of all swarms."""
    return [swarms_key(bytes([shard])) for shard in range(SWARM_SHARDS)]


@lru_cache(256)
def _plan_key(swarm: bytes) -> bytes:
    return _key(b"plan", swarm)


@lru_cache(4096)
def _shard_key(swarm: bytes, bits: int, index: int) -> bytes:
    return _key(b"directory", swarm, bytes([bits]), index.to_bytes(2))


def _key(purpose: bytes, *parts: bytes) -> bytes:
    return hashlib.sha1(b"\0".join((b"p2pllm", purpose, *parts)), usedforsecurity=False).digest()
