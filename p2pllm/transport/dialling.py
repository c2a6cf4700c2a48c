"""Trying the addresses of a peer: one that hangs costs a moment and not the whole time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial

from p2pllm.config import Address, format_addresses
from p2pllm.errors import LinkError

__all__ = ["dial_any"]

_STAGGER_S = 0.25


async def dial_any(
    addresses: Collection[Address], dial: Callable[[Address], Awaitable[None]], timeout: float
) -> str:
    """Dial the addresses until one works; return why none did within ``timeout`` seconds, or an empty text.

    ``dial`` raises LinkError or OSError where one does not; it is cancelled once another has worked.
    """
    failures = dict.fromkeys(addresses, "does not answer")

    async def attempt(address: Address) -> bool:
        try:
            await dial(address)
        except (LinkError, OSError) as error:
            failures[address] = str(error)
            return False
        return True

    try:
        async with asyncio.timeout(timeout):
            if await _race([partial(attempt, address) for address in failures], _STAGGER_S):
                return ""
    except TimeoutError:
        pass
    reasons = [f"{format_addresses([address])}: {reason}" for address, reason in failures.items()]
    return "; ".join(reasons) or "it has published no address"


async def _race(attempts: Sequence[Callable[[], Awaitable[bool]]], stagger: float) -> bool:
    """Return whether one of the attempts came to True; that ends the others.

    They start in order, each when one has failed or after ``stagger`` seconds, as RFC 8305 ("Happy Eyeballs")
    has it for the addresses of one name.
    """
    waiting = list(attempts)
    running: set[asyncio.Future[bool]] = set()
    try:
        while waiting or running:
            if waiting:
                running.add(asyncio.ensure_future(waiting.pop(0)()))
            done, running = await asyncio.wait(
                running, timeout=stagger if waiting else None, return_when=asyncio.FIRST_COMPLETED
            )
            if any(attempt.result() for attempt in done):
                return True
        return False
    finally:
        for attempt in running:
            attempt.cancel()
        await asyncio.gather(*running, return_exceptions=True)
