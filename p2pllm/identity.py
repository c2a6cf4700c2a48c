"""Who a peer is: an Ed25519 key pair, kept in the data directory and held by one process at a time.

The peer id is the SHA-1 of the public key and doubles as the Kademlia node id, so nobody can choose one.
Several peers on one machine take the first free of the numbered identities under the data directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import stat
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from p2pllm.errors import UsageError

__all__ = ["HeldIdentity", "Identity", "PeerId", "hold_identity", "peer_id_of", "verify"]

PeerId = str
"""40 lowercase hexadecimal digits: the SHA-1 of the peer's public key."""

_SEED_BYTES = 32

log = structlog.get_logger()


class Identity:
    """An Ed25519 key pair.

    ``public_key`` is 32 bytes, ``peer_id`` the 40 hexadecimal digits of its SHA-1, and ``node_id`` the same
    as the 20 bytes that Kademlia wants.
    """

    __slots__ = ("_private", "node_id", "peer_id", "public_key")

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public_key = private.public_key().public_bytes_raw()
        self.peer_id = peer_id_of(self.public_key)
        self.node_id = bytes.fromhex(self.peer_id)

    @classmethod
    def generate(cls) -> Identity:
        """A new identity from the system's randomness."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> Identity:
        """The identity whose private key is these 32 bytes."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    def sign(self, message: bytes) -> bytes:
        """The 64-byte signature of ``message``."""
        return self._private.sign(message)

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"


@lru_cache(4096)
def peer_id_of(public_key: bytes) -> PeerId:
    """The peer id that belongs to a 32-byte public key."""
    return hashlib.sha1(public_key, usedforsecurity=False).hexdigest()


def verify(public_key: bytes, message: bytes, signature: bytes) -> bool:
    """Whether ``signature`` is by the owner of ``public_key``; anything malformed is simply not."""
    try:
        _key(public_key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


@lru_cache(1024)
def _key(public_key: bytes) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(public_key)


class HeldIdentity:
    """An identity file that this process holds locked until ``close`` (or the end of a ``with`` block).

    ``path`` is its key file, ``identity-N.key``.
    """

    def __init__(self, identity: Identity, path: Path, descriptor: int) -> None:
        self.identity = identity
        self.path = path
        self._descriptor: int | None = descriptor

    @property
    def state_path(self) -> Path:
        """Where to keep what belongs to this identity: ``identity-N.json``, beside the key."""
        return self.path.with_suffix(".json")

    @property
    def local_peers(self) -> int:
        """How many identities of the data directory are held right now, this one included."""
        held = 0
        with _directory_lock(self.path.parent):
            for path in self.path.parent.glob("identity-*.key"):
                with contextlib.suppress(OSError):  # what cannot be opened is nobody's of ours
                    descriptor = os.open(path, os.O_RDWR)
                    try:
                        held += not _try_lock(descriptor)
                    finally:
                        os.close(descriptor)
        return held

    def close(self) -> None:
        """Let another process take this identity."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                _holder_file(self.path).unlink()
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def hold_identity(data_dir: Path, *, alone: bool = False) -> HeldIdentity:
    """Take the first identity under ``data_dir`` that no other process holds; created when there is none.

    With ``alone`` only the very first will do. Key files that others could read are closed to them.

    Raises UsageError if the directory cannot be written, a key file is not one of ours, or the identity that
    is wanted ``alone`` is held by another process, which the message names.
    """
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _directory_lock(data_dir):
            for number in itertools.count():
                path = data_dir / f"identity-{number}.key"
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
                if _try_lock(descriptor):
                    break
                os.close(descriptor)
                if alone:
                    raise UsageError(
                        f"the identity in {data_dir} is in use by {_holder(path)}: stop that one, or choose "
                        "another --data-dir"
                    )
            try:
                _close_to_others(path, descriptor)
                identity = _read_or_create(path, descriptor)
                _holder_file(path).write_text(f"{os.getpid()}\n")
                return HeldIdentity(identity, path, descriptor)
            except BaseException:
                os.close(descriptor)
                raise
    except OSError as error:
        raise UsageError(
            f"cannot keep an identity in {data_dir} ({error.strerror}): choose another --data-dir"
        ) from error


def _read_or_create(path: Path, descriptor: int) -> Identity:
    seed = os.read(descriptor, _SEED_BYTES + 1)
    if not seed:
        seed = os.urandom(_SEED_BYTES)
        os.write(descriptor, seed)
        os.fsync(descriptor)
    if len(seed) != _SEED_BYTES:
        raise UsageError(f"{path} is not a p2pllm identity: move it away and start again")
    return Identity.from_seed(seed)


def _holder_file(path: Path) -> Path:
    """Where the holder of the key file ``path`` leaves its pid for messages; it is the lock that counts."""
    return path.with_suffix(".pid")


def _holder(path: Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        return f"process {int(_holder_file(path).read_text())}"
    return "another process"


@contextlib.contextmanager
def _directory_lock(data_dir: Path) -> Iterator[None]:
    """Serialise those who probe the locks, or one peer's count would look like a held identity to another."""
    descriptor = os.open(data_dir / "identities.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


# The lock belongs to the open file, so the system releases it however the process ends.
if sys.platform == "win32":
    import msvcrt

    def _close_to_others(path: Path, descriptor: int) -> None:
        """The directory's access list decides who reads what is in it."""

    # Locks are mandatory there: a byte far behind the key leaves the key itself readable.
    _LOCK_OFFSET = 1 << 20

    def _lock(descriptor: int) -> None:
        os.lseek(descriptor, _LOCK_OFFSET, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_LOCK, 1)

    def _try_lock(descriptor: int) -> bool:
        os.lseek(descriptor, _LOCK_OFFSET, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        finally:
            os.lseek(descriptor, 0, os.SEEK_SET)
        return True

else:
    import fcntl

    def _close_to_others(path: Path, descriptor: int) -> None:
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            log.warning("identity_was_open_to_others", path=str(path), mode=f"{mode:04o}")
            with contextlib.suppress(OSError):  # some file systems know no modes
                os.fchmod(descriptor, stat.S_IRUSR | stat.S_IWUSR)

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)

    def _try_lock(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
