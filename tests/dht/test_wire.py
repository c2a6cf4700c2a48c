"""The datagrams: what goes out comes in, what strangers send is a message or None, no answer is a lever."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pllm.dht.wire import NO_TOKEN, Reply, Request, encode_reply, encode_request, parse

NONCE, SENDER, TOKEN = bytes(range(20)), b"s" * 20, b"t" * 8

plain = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text(max_size=20)
    | st.binary(max_size=60)
)
values = st.recursive(plain, lambda inner: st.lists(inner, max_size=5), max_leaves=8)


@given(st.text(max_size=10), st.lists(values, max_size=4))
def test_a_request_comes_in_as_it_went_out(method: str, arguments: list[object]) -> None:
    datagram = encode_request(NONCE, method, TOKEN, SENDER, *arguments)
    assert parse(datagram) == Request(NONCE, method, TOKEN, SENDER, arguments)


@given(values)
def test_a_reply_comes_in_as_it_went_out(result: object) -> None:
    assert parse(encode_reply(NONCE, SENDER, TOKEN, result)) == Reply(NONCE, SENDER, TOKEN, result)


@given(st.binary(max_size=1600))
def test_noise_never_raises(noise: bytes) -> None:
    parse(noise)


@given(
    st.sampled_from([0, 1]),
    st.recursive(plain, lambda i: st.lists(i) | st.dictionaries(plain, i), max_leaves=9),
)
def test_any_msgpack_never_raises(kind: int, packed: object) -> None:
    parse(bytes([kind]) + NONCE + msgpack.packb(packed))


@pytest.mark.parametrize(
    "body",
    [
        b"\xdd\xff\xff\xff\xff",  # an array that claims four billion items
        b"\xc6\xff\xff\xff\xff",  # as many bytes
        b"\x91" * 1400,  # an array in an array in an array
        msgpack.packb([0] * 65),
        msgpack.packb({"ping": 1}),
        msgpack.packb(["ping", TOKEN, SENDER, msgpack.ExtType(5, b"x")]),
        msgpack.packb(["ping", TOKEN, SENDER]) + b"\0",
        msgpack.packb(["ping", TOKEN, SENDER[:-1]]),
        msgpack.packb(["ping", TOKEN[:-1], SENDER]),
        msgpack.packb([b"ping", TOKEN, SENDER]),
        msgpack.packb(["ping", SENDER]),
        b"\x93\xa4\xff\xff\xff\xff",  # a method that is not UTF-8
        b"",
    ],
)
def test_what_is_not_a_message_is_none(body: bytes) -> None:
    assert parse(b"\0" + NONCE + body) is None
    assert parse(b"\1" + NONCE + body) is None


def test_size_and_kind_are_checked_first() -> None:
    good = encode_request(NONCE, "ping", TOKEN, SENDER)
    assert parse(b"\2" + good[1:]) is None
    assert parse(good[:21]) is None
    assert isinstance(parse(encode_request(NONCE, "ping", TOKEN, SENDER, bytes(1438))), Request)
    assert parse(encode_request(NONCE, "ping", TOKEN, SENDER, bytes(1439))) is None


@pytest.mark.parametrize("method", ["ping", "find_node", "rget", "rput", "digest", "pick"])
def test_the_answer_that_only_brings_a_token_is_no_longer_than_any_question(method: str) -> None:
    assert len(encode_reply(NONCE, SENDER, TOKEN, None)) <= len(
        encode_request(NONCE, method, NO_TOKEN, SENDER)
    )
