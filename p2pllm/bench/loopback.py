"""Three real peers on loopback, each a process with one thread, that share the model."""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final

from p2pllm.children import Child, Children
from p2pllm.errors import P2PLLMError
from p2pllm.serving import Figures, api_client

__all__ = ["STAGES", "THREADS", "Loopback", "loopback", "peer_command", "shares", "spans"]

STAGES: Final = 3
THREADS: Final = 1
"""Of each peer: those of one chain take turns, and all cores each would only disturb the others."""

START_S: Final = 180.0
POLL_S: Final = 0.1


class Loopback:
    """A swarm that can answer at ``url``."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def decode_tok_s(self, question: str, tokens: int) -> float:
        """Tokens per second of a greedy answer, the first one and the prompt left out.

        Raises P2PLLMError, also when the model has said all it wants to say before ``tokens``.
        """
        messages = [{"role": "user", "content": question}]
        async with (
            api_client(self._url) as client,
            aclosing(client.chat(messages, temperature=0, max_tokens=tokens)) as answer,
        ):
            async for piece in answer:
                if isinstance(piece, Figures):
                    if len(piece.chain) != STAGES:
                        raise P2PLLMError(f"the chain has {len(piece.chain)} stages, not {STAGES}")
                    return piece.tokens_per_s
        raise P2PLLMError("the answer ended without its figures")


def shares(layers: int, head_layers: float) -> list[range]:
    """The layers of each peer, the head counted as so many layers."""
    share = (layers + head_layers) / STAGES
    bounds = [*(round(share * number) for number in range(STAGES)), layers]
    return [range(start, end) for start, end in itertools.pairwise(bounds)]


def spans(layers: int, head_layers: float) -> list[str]:
    """The same as ``--layers`` takes them."""
    return [f"{part.start}:{part.stop}" for part in shares(layers, head_layers)]


def peer_command(model: str, folder: str) -> list[str]:
    """What starts a peer on loopback that keeps what it must in ``folder`` and ends with its parent."""
    return [
        *(sys.executable, "-m", "p2pllm", "up", "--headless", "--log-json", "--until-eof"),
        *("--host", "127.0.0.1", "--port", "0", "--api-port", "0", "--model", model),
        *("--threads", str(THREADS), "--data-dir", folder),
    ]


@asynccontextmanager
async def loopback(model: str, layers: Sequence[str], options: Sequence[str]) -> AsyncIterator[Loopback]:
    """Start peers with these ``layers`` and further flags; stop them at the end. Raises P2PLLMError."""
    with tempfile.TemporaryDirectory(prefix="p2pllm-bench-") as folder:
        async with Children() as children:
            command = [*peer_command(model, folder), *options]
            peers: list[Child] = []
            joining: list[str] = []
            for number, span in enumerate(layers, 1):
                peer = await children.start(f"peer {number}", [*command, "--layers", span, *joining])
                peers.append(peer)
                if not joining:
                    joining = ["--bootstrap", str((await peer.event("peer_listening"))["addresses"])]
            try:
                async with asyncio.timeout(START_S):
                    events: list[dict[str, Any]] = [await peer.event("api_listening") for peer in peers]
                    url = str(events[0]["url"])
                    await _until_ready(url, peers)
            except TimeoutError:
                raise P2PLLMError(f"the peers were not ready after {START_S:.0f} s") from None
            yield Loopback(url)


async def _until_ready(url: str, peers: Sequence[Child]) -> None:
    async with api_client(url) as client:
        while not await client.ready():
            for peer in peers:
                peer.check()
            await asyncio.sleep(POLL_S)
