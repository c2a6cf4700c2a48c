"""Links to the peers of a session: bringing them up, and what a broken one means."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from p2pllm.errors import FrameError, LinkError, RequestError
from p2pllm.scheduling import PeerId
from p2pllm.serving.entry.request import Network
from p2pllm.serving.entry.trouble import StageLostError
from p2pllm.transport import Message

__all__ = ["reach", "short", "tell"]


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


def tell(network: Network, peer: PeerId, message: Message) -> None:
    """Send a peer a message. Raises StageLostError if that fails, RequestError if it is too large."""
    try:
        network.send(peer, message)
    except LinkError as error:
        raise StageLostError({peer}, f"peer {peer[:8]}: {error}") from error
    except FrameError as error:
        raise RequestError(f"this request cannot be sent to a stage: {error}") from error


def short(peers: Iterable[PeerId]) -> str:
    """Peers as people read them."""
    return ", ".join(peer[:8] for peer in sorted(peers))
