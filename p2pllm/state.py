"""What a peer remembers between runs: small, on disk beside its identity."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

import structlog

from p2pllm.config import Address, format_addresses, parse_address
from p2pllm.errors import UsageError

__all__ = ["MAX_PEERS", "Remembered"]

MAX_PEERS: Final = 64
"""Addresses that are kept: enough that some still answer after weeks."""

_MAX_NUMBER: Final = 2**53
_MAX_BYTES: Final = 2**16

log = structlog.get_logger()


class Remembered:
    """The highest ``epoch`` that this peer has seen of any leader, the last number ``seq`` of its own
    records, and where it found good ``peers``.

    ``peers`` are (host, port), best first; of more than MAX_PEERS the first are kept. All are replaced as a
    whole, so that one thread may save while another goes on.
    """

    def __init__(self, path: Path, epoch: int = 0, seq: int = 0, peers: Sequence[Address] = ()) -> None:
        self.epoch = epoch
        self.seq = seq
        self.peers = peers
        self._path = path
        self._saving = threading.Lock()

    @classmethod
    def load(cls, path: Path) -> Self:
        """What is in the file, nothing if there is none; a broken one is put aside with a warning. Blocks."""
        try:
            with path.open("rb") as file:
                return cls(path, *_parse(file.read(_MAX_BYTES + 1)))
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("state_unreadable", path=str(path), reason=error.strerror)
        except ValueError as error:
            aside = path.with_name(f"{path.name}.broken")
            log.warning("state_broken", path=str(path), moved_to=str(aside), reason=str(error))
            with contextlib.suppress(OSError):
                path.replace(aside)
        return cls(path)

    def save(self) -> None:
        """Write it, so that at any moment either the old file or the new one is there, whole. Blocks.

        A disk that does not take it is worth a warning only: the peer works without.
        """
        with self._saving:
            peers = [format_addresses([peer]) for peer in self.peers[:MAX_PEERS]]
            state = {"epoch": self.epoch, "seq": self.seq, "peers": peers}
            try:
                _write(self._path, json.dumps(state, indent=1).encode())
            except OSError as error:
                log.warning("state_not_saved", path=str(self._path), reason=error.strerror)


def _parse(packed: bytes) -> tuple[int, int, list[Address]]:
    """Epoch, number and peers; ValueError if anything about the file is wrong."""
    if len(packed) > _MAX_BYTES:
        raise ValueError(f"it has more than {_MAX_BYTES} bytes")
    try:
        state = json.loads(packed)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(state, dict):
        raise ValueError("it is not an object")
    peers = state.get("peers")
    if not isinstance(peers, list) or not all(isinstance(peer, str) for peer in peers):
        raise ValueError("its peers are not a list of addresses")
    try:
        return (
            _number(state, "epoch"),
            _number(state, "seq"),
            [parse_address(peer) for peer in peers[:MAX_PEERS]],
        )
    except UsageError as error:
        raise ValueError(str(error)) from None


def _number(state: dict[str, object], name: str) -> int:
    number = state.get(name)
    if type(number) is not int or not 0 <= number <= _MAX_NUMBER:  # a bool is an int to isinstance
        raise ValueError(f"its {name} is not a whole number")
    return number


def _write(path: Path, content: bytes) -> None:
    fresh = path.with_name(f"{path.name}.new")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
