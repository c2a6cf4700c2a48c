"""What a session is about: the request, and what its entry needs of the world around it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from p2pllm.execution import SamplingParams
from p2pllm.scheduling import PeerId
from p2pllm.transport import Message

__all__ = ["Generation", "Network"]


@dataclass(frozen=True, slots=True)
class Generation:
    """One request: ``prompt`` token ids, how to sample, and where to stop."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int

    @property
    def limit(self) -> int:
        """The position of the last token that may be generated."""
        return len(self.prompt) + self.max_tokens - 1


@dataclass(frozen=True, slots=True)
class Network:
    """What a session needs of the world around it; ``own`` is the entry itself.

    ``send`` queues a message, ``connect`` brings up a link; both raise LinkError. ``eos`` are the ids that
    end a text, ``vocabulary`` is above all token ids. ``numerics`` says how a peer rounds, ``secret`` keys
    the names of what stages keep for later sessions.
    """

    own: PeerId
    send: Callable[[PeerId, Message], None]
    connect: Callable[[PeerId], Awaitable[None]]
    eos: frozenset[int]
    vocabulary: int
    numerics: Callable[[PeerId], str]
    secret: bytes
