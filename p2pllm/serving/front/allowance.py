"""What each client has used of what it may: requests at once, and tokens a minute. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from p2pllm.errors import BusyError
from p2pllm.serving.front.keys import Client

__all__ = ["Allowances"]

MAX_CLIENTS: Final = 4096
"""Clients remembered at most; who has a request open is never forgotten."""


@dataclass(slots=True)
class _Use:
    open: int = 0
    spent: float = 0.0
    """Tokens of the last minute or so: they leak away at the rate that the client may use them."""
    at: float = 0.0


class Allowances:
    """The uses of all clients, by name. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._uses: OrderedDict[str, _Use] = OrderedDict()

    def enter(self, client: Client, now: float, each_s: float = 1.0) -> None:
        """Count a request as open; raises BusyError, which says when to come again, if that is too many.

        ``each_s`` is about how long it takes until one of those that are open is done.
        """
        use = self._uses.setdefault(client.name, _Use(at=now))
        self._uses.move_to_end(client.name)
        if client.concurrent is not None and use.open >= client.concurrent:
            raise BusyError(
                f"{client.name} has {use.open} requests open, and no more are allowed at once",
                retry_after_s=each_s,
            )
        if client.tokens_per_minute is not None:
            rate = client.tokens_per_minute / 60
            use.spent, use.at = max(0.0, use.spent - (now - use.at) * rate), now
            if use.spent >= client.tokens_per_minute:
                raise BusyError(
                    f"{client.name} has used its {client.tokens_per_minute} tokens of this minute",
                    retry_after_s=(use.spent - client.tokens_per_minute) / rate + 1 / rate,
                )
        use.open += 1
        self._forget()

    def leave(self, client: Client, tokens: int, now: float) -> None:
        """Count an open request as done, which took so many tokens."""
        use = self._uses[client.name]
        use.open -= 1
        if client.tokens_per_minute is not None:
            use.spent = max(0.0, use.spent - (now - use.at) * client.tokens_per_minute / 60) + tokens
            use.at = now

    def _forget(self) -> None:
        while len(self._uses) > MAX_CLIENTS:
            name = next((name for name, use in self._uses.items() if not use.open), None)
            if name is None:
                return
            del self._uses[name]
