"""API keys: who may ask, under which name, and how much. The file they are in may change meanwhile."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import os
import secrets
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from p2pllm.errors import UsageError

__all__ = ["ApiKeys", "Client"]

MAX_FILE_BYTES: Final = 2**20
LOOK_S: Final = 2.0
"""How often the file is looked at."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Client:
    """Whoever asks: the holder of a key, or, without keys, whoever is at an address.

    ``concurrent`` bounds requests at once, ``tokens_per_minute`` what they take, prompts included; None: no
    bound. Where requests have to wait, who has twice the ``weight`` is served twice as much.
    """

    name: str
    concurrent: int | None = None
    tokens_per_minute: int | None = None
    weight: float = 1.0

    @classmethod
    def at(cls, address: str) -> Client:
        """Whoever is at an IP address; a whole IPv6 network of 64 bits, as one machine may have, is one
        client.
        """
        try:
            ip = ipaddress.ip_address(address)
        except ValueError:
            return cls(address)
        if isinstance(ip, ipaddress.IPv4Address) or ip.ipv4_mapped is not None:
            return cls(address)
        return cls(str(ipaddress.IPv6Network((int(ip), 64), strict=False)))


class _Key(BaseModel):
    """One ``[[keys]]`` table of the file."""

    model_config = ConfigDict(extra="forbid")

    key: Annotated[str, Field(min_length=16, max_length=512)]
    name: Annotated[str, Field(min_length=1, max_length=64)]
    concurrent: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    weight: Annotated[float, Field(ge=0.01, le=100)] = 1.0


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keys: Annotated[list[_Key], Field(min_length=1)]


class ApiKeys:
    """The keys of a TOML file; ``follow`` keeps up with changes of it.

    ``ApiKeys(path)`` reads it at once: UsageError if there is nothing good in it. ``own`` is a key beside
    them, for whoever is in this very process.
    """

    def __init__(self, path: Path) -> None:
        self.own = secrets.token_urlsafe(32)
        self._own = {_digest(self.own): Client("this peer's own chat")}
        self._path = path
        self._seen = self._stamp()
        self._clients = self._own | _read(path)

    def client(self, key: str) -> Client | None:
        """Whose key this is, or None. Takes as long for every key, right or wrong."""
        asked = _digest(key)
        found: Client | None = None
        for digest, client in self._clients.items():
            if hmac.compare_digest(digest, asked):
                found = client
        return found

    async def follow(self) -> None:
        """Read the file again whenever it has changed, for ever; what cannot be read changes nothing."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await asyncio.to_thread(self.refresh)
            except UsageError as error:
                log.error("api_keys_not_read", reason=str(error), do="those of before are still good")

    def refresh(self) -> None:
        """Read the file again if it has changed; UsageError if there is nothing good in it, once a change."""
        if (stamp := self._stamp()) == self._seen:
            return
        self._seen = stamp
        self._clients = self._own | _read(self._path)
        log.info("api_keys_read", keys=len(self._clients) - 1)

    def _stamp(self) -> tuple[int, int, int] | None:
        """What changes when the file does."""
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size


def _read(path: Path) -> dict[bytes, Client]:
    """Clients by the digests of their keys."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES)
        entries = _File.model_validate(tomllib.loads(text.decode())).keys
    except OSError as error:
        raise UsageError(f"cannot read --api-key-file {path} ({error.strerror})") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UsageError(f"--api-key-file {path}: {place}: {first['msg']}") from error
    except ValueError as error:  # neither UTF-8 nor TOML
        raise UsageError(f"--api-key-file {path} is not TOML: {error}") from error
    for what in ("name", "key"):
        if len({getattr(entry, what) for entry in entries}) < len(entries):
            raise UsageError(f"--api-key-file {path}: two keys have the same {what}")
    return {
        _digest(entry.key): Client(entry.name, entry.concurrent, entry.tokens_per_minute, entry.weight)
        for entry in entries
    }


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()
