"""What the command line says, parsed once into typed values. No behaviour, no I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from p2pllm.errors import UsageError

__all__ = [
    "API_PORT",
    "EVERYWHERE",
    "INTERRUPTED",
    "LINK_PORT",
    "PORT_TRIES",
    "Address",
    "PeerConfig",
    "default_data_dir",
    "format_addresses",
    "format_bytes",
    "parse_address",
    "parse_addresses",
    "parse_hosts",
    "parse_layers",
    "parse_listen",
    "parse_region",
    "parse_seconds",
    "parse_size",
]

Address = tuple[str, int]
"""Host (name, IPv4 or IPv6 without brackets) and port."""

EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104  peers on other machines must reach it
"""What one listens on to listen on all addresses, IPv4 and IPv6."""

API_PORT = 8000
"""Default port of the HTTP API."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""

LINK_PORT = 7600
"""Default port of peer links (TCP) and the DHT (UDP)."""

PORT_TRIES = 100
"""How many ports from a default on are tried before giving up."""

MAX_HOST = 255
MAX_SIZE = 2**60
MAX_SECONDS = 86400
MAX_REGION = 64
"""Bytes in the name of a region."""

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)
_MAX_PORT = 65535
_MAX_STRETCH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConfig:
    """Everything one peer is told. ``None`` means: decide by looking at the machine or the model."""

    model: str = "embedded"
    bootstrap: tuple[Address, ...] = ()
    new_swarm: bool = False
    region: str = "default"
    host: tuple[str, ...] = EVERYWHERE
    port: int | None = None
    advertise: tuple[str, ...] = ()
    api_host: str = "127.0.0.1"
    api_port: int | None = None
    api_open: bool = False
    api_key_file: Path | None = None
    queue_timeout: float = 60.0
    stretch: float = 1.8
    swarm_key_file: Path | None = None
    insecure_links: bool = False
    grace: float = 30.0
    memory: int | None = None
    layers: tuple[int, int] | None = None
    device: str | None = None
    dtype: str | None = None
    quant: str = "none"
    threads: int | None = None
    headless: bool = False
    until_eof: bool = False
    data_dir: Path
    log_json: bool = False
    debug: bool = False


def default_data_dir() -> Path:
    """Where identities and logs live unless ``--data-dir`` says otherwise."""
    return Path.home() / ".p2pllm"


def parse_address(text: str) -> Address:
    """``host:port`` or ``[v6]:port`` → (host, port). Raises UsageError."""
    host, _, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if (
        not 1 <= len(host) <= MAX_HOST
        or not host.isprintable()
        or not port.isascii()
        or not port.isdigit()
        or not 1 <= int(port) <= _MAX_PORT
    ):
        raise UsageError(f"{text!r} is not an address: write host:port, for example 192.0.2.1:{LINK_PORT}")
    return host, int(port)


def parse_addresses(text: str) -> tuple[Address, ...]:
    """Comma-separated addresses, in order, without repeats. Raises UsageError."""
    return tuple(dict.fromkeys(parse_address(part) for part in text.split(",")))


def parse_hosts(text: str) -> tuple[str, ...]:
    """Comma-separated hosts, each with or without a port, as ``--advertise`` takes them. Raises
    UsageError.
    """
    hosts = tuple(part.strip() for part in text.split(","))
    for host in hosts:
        if not 1 <= len(host) <= MAX_HOST or not host.isprintable():
            raise UsageError(
                f"{host!r} is not a host: write a name or an address, with :port where it differs"
            )
    return hosts


def parse_listen(text: str) -> tuple[str, ...]:
    """Comma-separated addresses to listen on, one of each family at most. Raises UsageError."""
    hosts = tuple(part.strip().removeprefix("[").removesuffix("]") for part in text.split(","))
    families = [":" in host for host in hosts]
    if len(set(families)) < len(families) or not all(
        1 <= len(host) <= MAX_HOST and host.isprintable() for host in hosts
    ):
        raise UsageError(f"{text!r} is nothing to listen on: write an IPv4 address, an IPv6 address, or both")
    return hosts


def parse_seconds(text: str) -> float:
    """A number of seconds up to a day. Raises UsageError."""
    return _number(text, 0, MAX_SECONDS, f"number of seconds up to {MAX_SECONDS}")


def parse_stretch(text: str) -> float:
    """How many times as long a token may take. Raises UsageError."""
    return _number(text, 1, _MAX_STRETCH, f"number from 1 to {_MAX_STRETCH}")


def _number(text: str, least: float, most: float, what: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text) or not least <= float(text) <= most:
        raise UsageError(f"{text!r} is no {what}")
    return float(text)


def parse_layers(text: str) -> tuple[int, int]:
    """``start:end`` (half-open) → (start, end). Raises UsageError."""
    start, _, end = text.partition(":")
    if not (start.isdecimal() and end.isdecimal()) or int(start) >= int(end):
        raise UsageError(
            f"{text!r} is not a layer range: write --layers start:end, for example 0:10 for the first ten"
        )
    return int(start), int(end)


def parse_region(text: str) -> str:
    """The name of a region, as records can carry it. Raises UsageError."""
    if not text.isprintable() or not 1 <= len(text.encode()) <= MAX_REGION:
        raise UsageError(f"{text!r} is no name for a region: use 1 to {MAX_REGION} printable characters")
    return text


def parse_size(text: str) -> int:
    """``8GiB``, ``500MB``, ``1.5g`` or plain bytes → bytes. Raises UsageError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a size: write for example 8GiB or 500MB")
    size = float(match[1]) * _UNITS[(match[2] or "").lower()]
    if not 1 <= size < MAX_SIZE:
        raise UsageError(f"{text!r} is not a size that memory has: write for example 8GiB or 500MB")
    return int(size)


def format_addresses(addresses: Iterable[Address]) -> str:
    """The inverse of ``parse_addresses``."""
    return ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in addresses)


def format_bytes(count: float) -> str:
    """Bytes as people read them: ``621 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
