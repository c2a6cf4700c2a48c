"""Reading what a stranger packed: every field is checked for type and limits before anybody uses it."""

from __future__ import annotations

from typing import Final, cast

from p2pllm.errors import RecordError

__all__ = ["MAX_INT", "MAX_NUMBER", "Fields"]

MAX_INT: Final = 2**63 - 1

MAX_NUMBER: Final = (2 - 2**-23) * 2.0**127
"""The largest that single precision holds, in which records are written; sums of many are finite still."""


class Fields:
    """Reads the fields of a list that a stranger sent, in order; RecordError at the first that is wrong."""

    def __init__(self, packed: object, length: int) -> None:
        if not isinstance(packed, list) or len(packed) != length:
            raise RecordError(f"a record has something else where {length} fields belong")
        self._rest = iter(cast(list[object], packed))

    def next(self) -> object:
        """The next field, whatever it is."""
        return next(self._rest)

    def items(self, limit: int) -> list[object]:
        """A list of at most ``limit`` items."""
        value = self.next()
        if not isinstance(value, list) or len(value) > limit:
            raise RecordError(f"a record has something else where at most {limit} items belong")
        return value

    def octets(self, length: int, *, empty: bool = False) -> bytes:
        """Exactly ``length`` bytes, or none if it may be ``empty``."""
        value = self.next()
        if not isinstance(value, bytes) or not (len(value) == length or (empty and not value)):
            raise RecordError(f"a record has something else where {length} bytes belong")
        return value

    def text(self, limit: int) -> str:
        """At most ``limit`` printable characters."""
        value = self.next()
        # Unprintable text would reach the terminals of others.
        if not isinstance(value, str) or len(value) > limit or not value.isprintable():
            raise RecordError(
                f"a record has something else where at most {limit} printable characters belong"
            )
        return value

    def count(self, limit: int = MAX_INT) -> int:
        """A whole number from 0 to ``limit``."""
        value = self.next()
        if type(value) is not int or not 0 <= value <= limit:  # a bool is an int to isinstance
            raise RecordError(f"a record has something else where a whole number up to {limit} belongs")
        return value

    def number(self, limit: float = MAX_NUMBER, *, lowest: float = 0.0) -> float:
        """A number from ``lowest`` to ``limit``."""
        value = self.next()
        if not isinstance(value, float) or not lowest <= value <= limit:  # NaN is nowhere between
            raise RecordError(
                f"a record has something else where a number from {lowest:g} to {limit:g} belongs"
            )
        return value

    def flag(self) -> bool:
        """Yes or no."""
        value = self.next()
        if not isinstance(value, bool):
            raise RecordError("a record has something else where yes or no belongs")
        return value
