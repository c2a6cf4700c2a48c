"""Why the system refused something, in its own words."""

from __future__ import annotations

import os

__all__ = ["reason_of"]


def reason_of(error: OSError) -> str:
    """Return the reason alone: asyncio puts addresses into it, which our messages have already."""
    # Failed look-ups of names have numbers of their own, below zero.
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error)
