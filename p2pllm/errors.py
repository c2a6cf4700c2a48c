"""Errors that reach a person. Each carries one line that says what is wrong and what to do about it.

The command line prints the line and leaves with ``exit_code``; the API turns it into an error body. Whatever
is not one of these is a bug and shows its traceback.
"""

from __future__ import annotations

__all__ = [
    "BusyError",
    "ClusterError",
    "ContextLengthError",
    "FrameError",
    "LinkError",
    "ModelError",
    "NoRouteError",
    "P2PLLMError",
    "PortTakenError",
    "RecordError",
    "RequestError",
    "SessionError",
    "UnreachedError",
    "UsageError",
]


class P2PLLMError(Exception):
    """Base of all errors meant for people: one line, no traceback."""

    exit_code = 1


class UsageError(P2PLLMError):
    """The command line is wrong; the message names the flag to change."""

    exit_code = 2


class PortTakenError(UsageError):
    """Somebody else listens there; another port may be free."""


class ModelError(P2PLLMError):
    """A model cannot be found, read, or run here."""


class ClusterError(P2PLLMError):
    """A cluster file cannot be read, or says what cannot be."""


class RecordError(P2PLLMError):
    """A DHT record is malformed, unsigned, too large, or otherwise not to be believed."""


class FrameError(P2PLLMError):
    """A frame from a peer is malformed or over its limits."""


class LinkError(P2PLLMError):
    """A peer cannot be reached, or its link broke or is congested."""


class BusyError(P2PLLMError):
    """There is no room for the request now: on a stage, or in what its client may have at once.

    ``retry_after_s`` says when to try again.
    """

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestError(P2PLLMError):
    """A client's request can never succeed as it is (too long, out of range)."""


class ContextLengthError(RequestError):
    """Prompt and answer together are longer than the model's context."""


class SessionError(P2PLLMError):
    """A generation broke off; what was generated so far was delivered."""


class UnreachedError(SessionError):
    """A stage cannot reach the next one, ``peer``, which others may well reach."""

    def __init__(self, peer: str, reason: str) -> None:
        self.peer = peer
        super().__init__(f"lost the next stage {peer[:8]}: {reason}")


class NoRouteError(P2PLLMError):
    """No chain covers the model. ``missing`` lists the uncovered layer ranges ``[start, end)``."""

    def __init__(self, missing: tuple[tuple[int, int], ...], message: str | None = None) -> None:
        self.missing = missing
        ranges = ", ".join(f"{start}:{end}" for start, end in missing)
        super().__init__(message or f"no peer serves layers {ranges}: start one with --layers {ranges}")
