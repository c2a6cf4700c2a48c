"""Checks that turn untrusted msgpack values into typed ones; messages name one beside each field's type."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeAlias

from p2pllm.errors import FrameError

__all__ = [
    "Check",
    "binary",
    "boolean",
    "choice",
    "integer",
    "integers",
    "items",
    "matching",
    "octets",
    "printable",
    "real",
    "row",
    "rows_of",
]

Check: TypeAlias = Callable[[object], object]
"""Takes a value as unpacked and returns it as the field's type; raises FrameError if it is not one."""


def boolean(value: object) -> bool:
    """Check for a bool."""
    if not isinstance(value, bool):
        raise FrameError("expected true or false")
    return value


def binary(value: object) -> bytes:
    """Check for bytes; the frame, not the field, bounds how many."""
    if not isinstance(value, bytes):
        raise FrameError("expected bytes")
    return value


def octets(most: int) -> Check:
    """Return a check for 1 to ``most`` bytes."""

    def check(value: object) -> bytes:
        if not isinstance(value, bytes) or not 1 <= len(value) <= most:
            raise FrameError(f"expected 1 to {most} bytes")
        return value

    return check


def rows_of(size: int, most: int, least: int = 0) -> Check:
    """Return a check for ``least`` to ``most`` bytes in whole rows of ``size``."""

    def check(value: object) -> bytes:
        if not isinstance(value, bytes) or not least <= len(value) <= most or len(value) % size:
            raise FrameError(f"expected {least} to {most} bytes in rows of {size}")
        return value

    return check


def integer(low: int, high: int) -> Check:
    """Return a check for an int in ``[low, high]``."""

    def check(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise FrameError(f"expected an integer from {low} to {high}")
        return value

    return check


def integers(low: int, high: int, most: int, least: int = 0) -> Check:
    """Return a check for a tuple of ``least`` to ``most`` ints in ``[low, high]``, made for thousands."""

    def check(value: object) -> tuple[int, ...]:
        if not isinstance(value, tuple) or not least <= len(value) <= most:
            raise FrameError(f"expected {least} to {most} integers")
        if not set(map(type, value)) <= {int} or (value and not low <= min(value) <= max(value) <= high):
            raise FrameError(f"expected integers from {low} to {high}")
        return value

    return check


def real(low: float, high: float) -> Check:
    """Return a check for a float in ``[low, high]``, which leaves NaN out; an int is converted."""

    def check(value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            raise FrameError(f"expected a number from {low} to {high}")
        return float(value)

    return check


def matching(pattern: str, what: str) -> Check:
    """Return a check for a str that matches the whole regular expression; ``what`` names it in the error."""
    fits = re.compile(pattern).fullmatch

    def check(value: object) -> str:
        if not isinstance(value, str) or not fits(value):
            raise FrameError(f"expected {what}")
        return value

    return check


def printable(most: int) -> Check:
    """Return a check for text that people read: cut at ``most`` characters, control characters dropped."""

    def check(value: object) -> str:
        if not isinstance(value, str):
            raise FrameError("expected text")
        return "".join(character for character in value[:most] if character.isprintable())

    return check


def choice(*options: str) -> Check:
    """Return a check for one of a few words."""

    def check(value: object) -> str:
        if not isinstance(value, str) or value not in options:
            raise FrameError(f"expected one of {', '.join(map(repr, options))}")
        return value

    return check


def items(item: Check, most: int, least: int = 0) -> Check:
    """Return a check for a tuple of ``least`` to ``most`` values that each pass ``item``."""

    def check(value: object) -> tuple[object, ...]:
        if not isinstance(value, tuple) or not least <= len(value) <= most:
            raise FrameError(f"expected {least} to {most} items")
        return tuple(map(item, value))

    return check


def row(*columns: Check) -> Check:
    """Return a check for a tuple with exactly these columns."""

    def check(value: object) -> tuple[object, ...]:
        if not isinstance(value, tuple) or len(value) != len(columns):
            raise FrameError(f"expected {len(columns)} columns")
        return tuple(column(cell) for column, cell in zip(columns, value, strict=True))

    return check
