"""Waiting for what others bring about."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

DEADLINE_S = 5.0
"""Bounds a failure only."""


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until it is so."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.002)


def has_ipv6() -> bool:
    """Whether this machine has an IPv6 loopback."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
