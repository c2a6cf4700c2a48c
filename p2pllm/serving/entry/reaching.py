"""Links to many peers at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from p2pllm.errors import LinkError
from p2pllm.scheduling import PeerId
from p2pllm.serving.entry.trouble import StageLostError

__all__ = ["reach", "short"]


async def reach(peers: Iterable[PeerId], connect: Callable[[PeerId], Awaitable[None]]) -> None:
    """Bring up the links to all of them. Raises StageLostError with those that cannot be reached."""

    async def problem(peer: PeerId) -> str:
        try:
            await connect(peer)
        except LinkError as error:
            return str(error) or "no answer"
        return ""

    ordered = sorted(peers)
    found = zip(ordered, await asyncio.gather(*map(problem, ordered)), strict=True)
    unreached = {peer: reason for peer, reason in found if reason}
    if unreached:
        raise StageLostError(unreached, "; ".join(unreached.values()))


def short(peers: Iterable[PeerId]) -> str:
    """Peers as people read them."""
    return ", ".join(peer[:8] for peer in sorted(peers))
