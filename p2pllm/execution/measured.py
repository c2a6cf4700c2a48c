"""How fast this machine was found to be, kept on disk for the next start.

A figure holds for what it was measured of: the device by name, the cores, threads, type and version of torch.
It is measured anew after a month, as drivers and clocks change, and so that one that was disturbed goes away.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Final

__all__ = ["MAX_AGE_S", "MAX_KINDS", "recall", "remember"]

MAX_AGE_S: Final = 30 * 86400.0
MAX_KINDS: Final = 32
"""Machines, so to speak, that one file knows: a data directory may be shared over a network."""

_MAX_BYTES: Final = 1 << 16

_Found = tuple[float, float, float]
"""FLOP/s, bytes/s, and when this was measured (s since 1970)."""


def recall(path: Path, kind: str, now: float) -> tuple[float, float] | None:
    """FLOP/s and bytes/s of ``kind``, None if they are not known or too old. Blocks."""
    found = _read(path).get(kind)
    return None if found is None or not 0 <= now - found[2] <= MAX_AGE_S else found[:2]


def remember(path: Path, kind: str, flops: float, bandwidth: float, now: float) -> None:
    """Write down what was measured of ``kind``; a disk that does not take it is no matter. Blocks."""
    known = _read(path) | {kind: (flops, bandwidth, now)}
    newest = sorted(known.items(), key=lambda entry: entry[1][2])[-MAX_KINDS:]
    fresh = path.with_name(f"{path.name}.{os.getpid()}")  # peers of a machine start at the same time
    try:
        fresh.write_text(json.dumps(dict(newest), indent=1), "utf-8")
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, _Found]:
    """What the file says, as far as it makes sense."""
    try:
        with path.open("rb") as file:
            stored = json.loads(file.read(_MAX_BYTES))
        entries = stored.items()
    except (OSError, ValueError, RecursionError, AttributeError):
        return {}
    return {kind: (found[0], found[1], found[2]) for kind, found in entries if _makes_sense(found)}


def _makes_sense(found: object) -> bool:
    return (
        isinstance(found, list)
        and len(found) == 3
        and all(isinstance(value, int | float) and 0 < value < math.inf for value in found)
    )
