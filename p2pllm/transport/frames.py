"""Messages to bytes and back, sans-IO.

A frame is a 4-byte big-endian header length, a msgpack header ``[kind, field, …]`` and, behind it, the raw
tensor of a message that carries one. Sizes are checked before anything is allocated, and every field before a
message is made.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Annotated, get_args, get_origin, get_type_hints

import msgpack

from p2pllm.errors import FrameError
from p2pllm.records import MAX_RECORD_BYTES
from p2pllm.transport.fields import MAX_PREFIX_BYTES
from p2pllm.transport.messages import Message
from p2pllm.transport.schema import Check

__all__ = ["DEFAULT_LIMITS", "Limits", "decode", "encode"]

_LENGTH = struct.Struct(">I")

_MAX_BINARY = max(MAX_RECORD_BYTES, MAX_PREFIX_BYTES)

_BODY = "data"
"""The field that travels behind the header; the last one of its class."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest frame, and the largest header in one, in bytes."""

    frame: int = 64 * 1024**2
    header: int = 64 * 1024


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class _Layout:
    """How one class of message lies on the wire: its fields in order, with their checks; one that
    ``has_body`` has it last.
    """

    cls: type[Message]
    checks: dict[str, Check]
    has_body: bool

    @classmethod
    def of(cls, message: type[Message]) -> _Layout:
        hints = get_type_hints(message, include_extras=True)
        checks = {}
        for field in fields(message):
            if get_origin(hints[field.name]) is not Annotated:
                raise TypeError(f"{message.__name__}.{field.name} has no check")
            checks[field.name] = get_args(hints[field.name])[1]
        return cls(message, checks, _BODY in checks)

    def check(self, values: Iterable[object]) -> list[object]:
        """Return values, in the order of the fields, as typed; raises FrameError naming the first one that
        is wrong.
        """
        checked: list[object] = []
        try:
            for check, value in zip(self.checks.values(), values, strict=True):
                checked.append(check(value))
        except FrameError as error:
            name = list(self.checks)[len(checked)]
            raise FrameError(f"bad {self.cls.__name__}.{name}: {error}") from None
        return checked


_LAYOUTS: dict[int, _Layout] = {message.kind: _Layout.of(message) for message in get_args(Message)}


def encode(message: Message, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """Return the frame of a message.

    Raises FrameError if a peer would refuse it, so that a mistake here costs one session and not the link.
    """
    layout = _LAYOUTS[message.kind]
    values = layout.check([getattr(message, name) for name in layout.checks])
    body: bytes = getattr(message, _BODY, b"")
    if layout.has_body:
        del values[-1]
    try:
        header = msgpack.packb((message.kind, *values))
    except ValueError as error:
        raise FrameError(f"cannot encode {layout.cls.__name__}: {error}") from None
    frame = b"".join((_LENGTH.pack(len(header)), header, body))
    if len(header) > limits.header or len(frame) > limits.frame:
        raise FrameError(
            f"{layout.cls.__name__} of {len(frame)} bytes is over the limit: send smaller chunks"
        )
    return frame


def decode(data: bytes, limits: Limits = DEFAULT_LIMITS) -> Message:
    """Return the message in a frame; raises FrameError for anything else."""
    if not _LENGTH.size <= len(data) <= limits.frame:
        raise FrameError(f"a frame of {len(data)} bytes")
    (length,) = _LENGTH.unpack_from(data)
    end = _LENGTH.size + length
    if length > limits.header or end > len(data):
        raise FrameError(f"a header of {length} bytes in a frame of {len(data)}")
    kind, *values = _unpack(data[_LENGTH.size : end])
    layout = _LAYOUTS.get(kind) if isinstance(kind, int) else None
    if layout is None:
        raise FrameError("unknown kind of message: update the older peer")
    if layout.has_body:
        values.append(data[end:])
    elif end != len(data):
        raise FrameError(f"{layout.cls.__name__} carries no data")
    if len(values) != len(layout.checks):
        raise FrameError(f"{layout.cls.__name__} has {len(layout.checks)} fields, not {len(values)}")
    return layout.cls(*layout.check(values))  # type: ignore[arg-type]


def _unpack(header: bytes) -> tuple[object, ...]:
    try:
        values = msgpack.unpackb(
            header, use_list=False, max_map_len=0, max_bin_len=_MAX_BINARY, max_ext_len=0
        )
    except ValueError as error:
        raise FrameError(f"the header is no msgpack: {error}") from None
    if not isinstance(values, tuple) or not values:
        raise FrameError("the header is no list")
    return values
