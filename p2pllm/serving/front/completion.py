"""Text in, text out: chat messages to a stream of text pieces, with stop strings, a finish reason and
figures.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from p2pllm.errors import ContextLengthError
from p2pllm.execution import SamplingParams
from p2pllm.scheduling import Chain
from p2pllm.serving.entry import Generated, Generation, Generator
from p2pllm.serving.front.gate import Place

if TYPE_CHECKING:
    from p2pllm.execution.tokenizer import ChatTokenizer

__all__ = ["Completer", "Finished", "Prompt", "StopScanner", "Text"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One chat request. ``max_tokens`` None: as many as the model's context leaves."""

    messages: Sequence[Mapping[str, str]]
    sampling: SamplingParams
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Text:
    """The next piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of the answer: why, and what it took."""

    reason: str
    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompt that needed no reading: all stages had kept them."""

    token_ids: tuple[int, ...]
    chain: Chain
    ttft_s: float
    tokens_per_s: float
    """Decode speed: tokens after the first ÷ seconds since the first (0 when there is only one)."""


class StopScanner:
    """Finds the first stop string in a growing text, holding back what may turn out to be the start of one.
    Pure.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Add text; returns what is certain to come before any stop string."""
        self._held += text
        hits = [(index + len(stop), index) for stop in self._stop if (index := self._held.find(stop)) >= 0]
        if hits:
            # The one that is complete first, whatever the pieces in which the text came.
            self.found = True
            return self._release(min(hits)[1])
        undecided = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        return self._release(len(self._held) - undecided)

    def flush(self) -> str:
        """The rest, when no more text will come."""
        return "" if self.found else self._release(len(self._held))

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` with which ``stop`` begins."""
    return next(
        (size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0
    )


class Completer:
    """Joins the tokenizer and the generator."""

    def __init__(self, tokenizer: ChatTokenizer, generator: Generator) -> None:
        self.generator = generator
        self._tokenizer = tokenizer

    async def complete(self, prompt: Prompt, place: Place) -> AsyncGenerator[Text | Finished]:
        """Wait for the turn of ``place``, yield text as it arrives, then one ``Finished``. Closing the
        generator frees the chain.

        Raises: what ``Place.through`` and ``Generator.generate`` raise, before or between pieces.
        """
        # Long prompts take long to tokenize; the loop must stay free meanwhile.
        ids = tuple(await asyncio.to_thread(self._tokenizer.encode_chat, prompt.messages))
        room = self.generator.context - len(ids)
        if room < 1:
            raise ContextLengthError(
                f"the prompt has {len(ids)} tokens; the model takes {self.generator.context - 1} at most"
            )
        place.prompt = len(ids)
        request = Generation(ids, prompt.sampling, room if prompt.max_tokens is None else prompt.max_tokens)
        decoder, scanner = self._tokenizer.decoder(), StopScanner(prompt.stop)
        began, first, tokens = time.monotonic(), 0.0, list[Generated]()
        reason = "stop"
        async with aclosing(place.through(lambda: self.generator.generate(request))) as stream:
            async for generated in stream:
                tokens.append(generated)
                first = first or time.monotonic()
                text = scanner.push(decoder.push(generated.token))
                if text:
                    yield Text(text)
                if scanner.found:
                    break
                reason = generated.final or reason
        text = scanner.push(decoder.flush()) + scanner.flush() if not scanner.found else ""
        if text:
            yield Text(text)
        spent = time.monotonic() - first
        yield Finished(
            reason="stop" if scanner.found else reason,
            prompt_tokens=len(ids),
            cached_tokens=tokens[-1].cached,
            token_ids=tuple(generated.token for generated in tokens),
            chain=tokens[-1].chain,
            ttft_s=first - began,
            tokens_per_s=(len(tokens) - 1) / spent if len(tokens) > 1 else 0.0,
        )
