"""What a session knows to have been said: the prompt, and every token that came of it. Pure."""

from __future__ import annotations

from collections import deque

from p2pllm.serving.entry.prefix import prefix_names
from p2pllm.serving.entry.request import Generation
from p2pllm.transport import Token

__all__ = ["Transcript"]


class Transcript:
    """The tokens of one session."""

    def __init__(self, request: Generation, vocabulary: int) -> None:
        """``vocabulary`` is above all token ids."""
        self.known = list(request.prompt)
        self.ready: deque[Token] = deque()
        """Tokens that nobody has taken yet."""
        self.has_ended = False
        self._prompt = len(request.prompt)
        self._limit = request.limit
        self._vocabulary = vocabulary
        self._of_chain = 0
        self._nameable = request.limit

    @property
    def count(self) -> int:
        """How many tokens have come."""
        return len(self.known) - self._prompt

    @property
    def last(self) -> int:
        """The position of the last token known, which is fed again whenever the chain changes."""
        return len(self.known) - 1

    def take(self, token: Token) -> bool:
        """Take in the next token; False if it cannot be one."""
        is_next = token.position == len(self.known) <= self._limit
        if not is_next or token.token >= self._vocabulary:
            return False
        self.known.append(token.token)
        self.ready.append(token)
        self.has_ended = bool(token.final)
        self._of_chain += 1
        return True

    def begin_chain(self, *, is_alike: bool) -> None:
        """The stages are others from here on; ``is_alike`` if those round like the ones before."""
        if not is_alike:
            self._nameable = min(self.last, self._nameable)
        self._of_chain = 0

    def names(self, secret: bytes) -> bytes:
        """The names of the blocks that all stages have filled: the last token that came was not fed to them,
        and after a change of rounding no other session would come to the same.
        """
        filled = self.known[: self.last] if self._of_chain else []
        return prefix_names(filled[: self._nameable], secret)
