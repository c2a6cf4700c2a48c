"""The datagrams of the DHT, sans-IO: bytes in, typed values or None out.

The frame is rpcudp's: one byte (0 request, 1 reply), a 20-byte nonce, msgpack. In it::

    request  [method, token, sender id, argument...]
    reply    [sender id, token, result]

The token is the replier's proof that the asker receives what is sent to its address. A request without a
valid one is answered with the token alone (result nil), which is never longer than the request: nobody can
use a node to flood somebody else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, cast

import msgpack

from p2pllm.dht.contacts import ID_BYTES

__all__ = [
    "MAX_DATAGRAM_BYTES",
    "NONCE_BYTES",
    "NO_TOKEN",
    "TOKEN_BYTES",
    "Reply",
    "Request",
    "encode_reply",
    "encode_request",
    "parse",
]

TOKEN_BYTES: Final = 8
NO_TOKEN: Final = bytes(TOKEN_BYTES)
NONCE_BYTES: Final = 20
MAX_DATAGRAM_BYTES: Final = 1500

_MIN_DATAGRAM_BYTES = 22
_MAX_ITEMS = 64


@dataclass(frozen=True, slots=True)
class Request:
    """A question to this node."""

    nonce: bytes
    method: str
    token: bytes
    sender: bytes
    arguments: list[object]


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer to this node; ``result`` is None when the question must be repeated with ``token``."""

    nonce: bytes
    sender: bytes
    token: bytes
    result: object


def encode_request(nonce: bytes, method: str, token: bytes, sender: bytes, *arguments: object) -> bytes:
    """The datagram of a request."""
    return b"\0" + nonce + cast(bytes, msgpack.packb([method, token, sender, *arguments]))


def encode_reply(nonce: bytes, sender: bytes, token: bytes, result: object) -> bytes:
    """The datagram of a reply."""
    return b"\1" + nonce + cast(bytes, msgpack.packb([sender, token, result]))


def parse(datagram: bytes) -> Request | Reply | None:
    """The message in a datagram, or None if it is not one of ours in every respect."""
    if not _MIN_DATAGRAM_BYTES <= len(datagram) <= MAX_DATAGRAM_BYTES:
        return None
    nonce = datagram[1 : 1 + NONCE_BYTES]
    try:
        fields = msgpack.unpackb(
            datagram[1 + NONCE_BYTES :], max_array_len=_MAX_ITEMS, max_map_len=0, max_ext_len=0
        )
    except (ValueError, msgpack.UnpackException):
        return None
    match datagram[0], fields:
        case 0, [str(method), bytes(token), bytes(sender), *arguments] if _sized(token, sender):
            return Request(nonce, method, token, sender, arguments)
        case 1, [bytes(sender), bytes(token), result] if _sized(token, sender):
            return Reply(nonce, sender, token, result)
    return None


def _sized(token: bytes, sender: bytes) -> bool:
    return len(token) == TOKEN_BYTES and len(sender) == ID_BYTES
