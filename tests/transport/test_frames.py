"""Frames: what goes in comes out, and nothing else does."""

from __future__ import annotations

import dataclasses
import itertools
import math
import struct

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pllm.errors import FrameError
from p2pllm.records import MAX_RECORD_BYTES
from p2pllm.transport import (
    ENTRY_STAGE,
    HASH_BYTES,
    MAX_CHUNK_TOKENS,
    MAX_GENERATION,
    MAX_GOSSIP_RECORDS,
    MAX_PREFIX_BYTES,
    MAX_STAGES,
    Close,
    Failed,
    Gossip,
    Hidden,
    Limits,
    Open,
    Opened,
    Ping,
    Pong,
    Renew,
    Replay,
    Reroute,
    Resume,
    Token,
    Tokens,
    Where,
    decode,
    encode,
)

PEER = "0123456789abcdef0123456789abcdef01234567"

OPEN = Open(
    "s",
    1,
    2,
    ((PEER, 0, 10), (PEER, 10, 30)),
    PEER,
    256,
    0.7,
    0.9,
    40,
    2**63,
    (2, 0),
    511,
    10.0,
    bytes(range(24)),
    b"upstream",
)

EXAMPLES = [
    OPEN,
    Opened("s", 1, 0, 48),
    Opened("s", 1, 255, 48, 0.5),
    Reroute("s", 1, 3, ((PEER, 0, 10), (PEER, 10, 30)), 48),
    Resume("s", 1, 3, 40),
    Replay("s", 1, 3, PEER, 2, 4, 0, 48),
    Where("s", 1, 3),
    Tokens("s", 0, 0, 0, (1, 2, 49151), True),
    Hidden("s", 1, 2, 3, True, "bfloat16", (2, 3), bytes(range(12))),
    Token("s", ENTRY_STAGE, 0, 12, 7, "stop"),
    Failed("s", 2, 1, "broken", "gone"),
    Failed("s", 2, 1, "unreached", "gone", PEER),
    Close("s", bytes(16)),
    Renew("s"),
    Ping(2**64 - 1),
    Pong(0),
    Gossip((b"a record", bytes(1000))),
]

sessions = st.from_regex(r"[0-9A-Za-z_-]{1,64}", fullmatch=True)
counts = st.integers(0, 2**31 - 1)
indices = st.integers(0, MAX_STAGES - 1)
generations = st.integers(0, MAX_GENERATION)
peers = st.binary(min_size=20, max_size=20).map(bytes.hex)
prefixes = st.lists(st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES), max_size=20).map(b"".join)
finite = {"allow_nan": False, "allow_infinity": False}


@st.composite
def opens(draw):
    sizes = draw(st.lists(st.integers(1, 60), min_size=1, max_size=MAX_STAGES))
    bounds = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    stages = tuple((draw(peers), start, end) for start, end in itertools.pairwise(bounds))
    return Open(
        draw(sessions),
        draw(st.integers(0, len(stages) - 1)),
        draw(generations),
        stages,
        draw(peers),
        draw(counts),
        draw(st.floats(0, 1000, **finite)),
        draw(st.floats(0, 1, **finite)),
        draw(counts),
        draw(st.integers(-(2**63), 2**64 - 1)),
        tuple(draw(st.lists(counts, max_size=64))),
        draw(counts),
        draw(st.floats(0, 3600, **finite)),
        draw(prefixes),
        draw(st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES)),
    )


@st.composite
def hiddens(draw):
    dtype, size = draw(st.sampled_from([("float32", 4), ("bfloat16", 2), ("float16", 2)]))
    shape = tuple(draw(st.lists(st.integers(1, 8), min_size=1, max_size=3)))
    length = size * math.prod(shape)
    data = draw(st.binary(min_size=length, max_size=length))
    return Hidden(
        draw(sessions),
        draw(indices),
        draw(generations),
        draw(counts),
        draw(st.booleans()),
        dtype,
        shape,
        data,
    )


reasons = st.text(
    st.characters(codec="utf-8", exclude_categories=["C", "Z"], include_characters=" "), max_size=300
)
messages = st.one_of(
    opens(),
    hiddens(),
    st.builds(Opened, sessions, indices, generations, counts, st.floats(0, 1e9)),
    opens().map(lambda plan: Reroute(plan.session, plan.stage, plan.generation, plan.stages, plan.reserve)),
    st.builds(Resume, sessions, indices, generations, counts),
    st.builds(Where, sessions, indices, generations),
    st.builds(Replay, sessions, indices, generations, peers, indices, generations, counts, counts),
    st.builds(
        Tokens,
        sessions,
        indices,
        generations,
        counts,
        st.lists(counts, min_size=1, max_size=99).map(tuple),
        st.booleans(),
    ),
    st.builds(
        Token,
        sessions,
        st.integers(ENTRY_STAGE, 0),
        generations,
        counts,
        counts,
        st.sampled_from(["", "stop", "length"]),
    ),
    st.builds(
        Failed,
        sessions,
        indices,
        generations,
        st.sampled_from(["broken", "busy", "cut", "leaving", "unreached"]),
        reasons,
        st.just("") | peers,
    ),
    st.builds(Close, sessions, prefixes),
    st.builds(Renew, sessions),
    st.builds(Ping, st.integers(0, 2**64 - 1)),
    st.builds(Pong, st.integers(0, 2**64 - 1)),
    st.builds(Gossip, st.lists(st.binary(min_size=1, max_size=1000), max_size=MAX_GOSSIP_RECORDS).map(tuple)),
)


def frame(header, body=b""):
    """A frame made by hand."""
    packed = msgpack.packb(header)
    return struct.pack(">I", len(packed)) + packed + body


@given(messages)
def test_what_goes_in_comes_out(message):
    assert decode(encode(message)) == message


def test_as_much_gossip_as_there_may_be_fits_a_frame():
    message = Gossip((bytes(MAX_RECORD_BYTES),) * MAX_GOSSIP_RECORDS)
    assert decode(encode(message)) == message


def test_the_longest_prefix_fits_a_frame():
    message = dataclasses.replace(OPEN, prefix=bytes(MAX_PREFIX_BYTES))
    assert decode(encode(message)) == message


def test_the_layout_on_the_wire():
    assert encode(Token("s", 0, 2, 5, 7, "")) == bytes.fromhex("00000009 97 05 a173 00 02 05 07 a0")
    hidden = Hidden("s", 1, 2, 3, True, "float16", (1, 2), b"abcd")
    assert encode(hidden) == frame([4, "s", 1, 2, 3, True, "float16", [1, 2]], b"abcd")
    assert sorted({type(message).kind for message in EXAMPLES}) == list(range(1, 16))


@given(messages, st.data())
def test_a_frame_cut_short_or_extended_is_refused(message, data):
    whole = encode(message)
    with pytest.raises(FrameError):
        decode(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(FrameError):
        decode(whole + b"\x00")


@given(st.binary(max_size=200))
def test_noise_is_refused_and_nothing_else_is_raised(noise):
    with pytest.raises(FrameError):
        decode(noise)
    with pytest.raises(FrameError):
        decode(struct.pack(">I", len(noise)) + noise)


json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(EXAMPLES), st.data())
def test_a_field_of_any_other_shape_gives_a_message_or_a_frame_error(message, data):
    header = list(msgpack.unpackb(encode(message)[4 : 4 + struct.unpack_from(">I", encode(message))[0]]))
    header[data.draw(st.integers(0, len(header) - 1))] = data.draw(json_like)
    changed = frame(header, getattr(message, "data", b""))
    try:
        decoded = decode(changed)
    except FrameError:
        return
    # Whatever passed is a proper message: it survives the way back.
    assert decode(encode(decoded)) == decoded


@pytest.mark.parametrize(
    "header",
    [
        None,
        7,
        [],
        {},
        {"kind": 7},
        ["s", 7],
        [7],
        [7, "s", b"", "more"],
        [[7], "s"],
        [True, "s"],
        [99, "s"],
        [7, "s", "text"],
        [7, "s", bytes(HASH_BYTES - 1)],
        [7, "s", bytes(MAX_PREFIX_BYTES + HASH_BYTES)],
        [2, "s", 0, 0, -1, 0.0],
        [7, "", b""],
        [7, "x" * 65, b""],
        [7, "a b", b""],
        [7, "ü", b""],
        [7, b"s", b""],
        [9, -1],
        [9, 1.0],
        [9, True],
        [5, "s", -2, 0, 0, 0, ""],
        [5, "s", 1, 0, 0, 0, ""],
        [5, "s", 0, 0, -1, 0, ""],
        [5, "s", 0, -1, 0, 0, ""],
        [5, "s", 0, MAX_GENERATION + 1, 0, 0, ""],
        [5, "s", 0, 0, 2**31, 0, ""],
        [5, "s", 0, 0, 0, 0, "eos"],
        [3, "s", 0, 0, 0, [], True],
        [3, "s", 0, 0, 0, [1] * (MAX_CHUNK_TOKENS + 1), True],
        [3, "s", 0, 0, 0, [1, -1], True],
        [3, "s", MAX_STAGES, 0, 0, [1], True],
        [3, "s", 0, 0, 0, [1], 1],
        [6, "s", 0, 0, "tired", "", ""],
        [6, "s", 0, 0, "broken", "", "nobody"],
        [12, "s", 0, 1, [], 0],
        [12, "s", 1, 1, [[PEER, 0, 30]], 0],
        [12, "s", 0, 1, [[PEER, 1, 30]], 0],
        [12, "s", 0, 1, [[PEER, 0, 30]], -1],
        [13, "s", 0, 1, -1],
        [14, "s", 0, -1],
        [11, b"record"],
        [11, ["text"]],
        [11, [b""]],
        [11, [bytes(1001)]],
        [11, [b"record"] * (MAX_GOSSIP_RECORDS + 1)],
    ],
)
def test_wrong_headers_are_refused(header):
    with pytest.raises(FrameError):
        decode(frame(header))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stages", []),
        ("stages", [[PEER, 0, 30]]),  # there is no stage 1 then
        ("stages", [[PEER, 0, 10], [PEER, 11, 30]]),
        ("stages", [[PEER, 0, 10], [PEER, 10, 10]]),
        ("stages", [[PEER, 1, 10], [PEER, 10, 30]]),
        ("stages", [[PEER, 0, 10], [PEER, 10]]),
        ("stages", [[PEER, index, index + 1] for index in range(MAX_STAGES + 1)]),
        ("stages", [[PEER.upper(), 0, 10], [PEER, 10, 30]]),
        ("stages", [[PEER, 0, 10], [PEER, 10, 5000]]),
        ("entry", PEER[:-1]),
        ("entry", PEER + "\n"),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -0.1),
        ("top_p", 1.1),
        ("top_k", -1),
        ("seed", 0.5),
        ("eos", [1] * 65),
        ("lease_s", 1e9),
        ("prefix", bytes(HASH_BYTES + 1)),
        ("prefix", bytes(MAX_PREFIX_BYTES + HASH_BYTES)),
        ("upstream", b""),
        ("upstream", bytes(2 * HASH_BYTES)),
    ],
)
def test_wrong_fields_of_open_are_refused(field, value):
    names = [spec.name for spec in dataclasses.fields(Open)]
    header = [Open.kind, *(getattr(OPEN, name) for name in names)]
    assert decode(frame(header)) == OPEN
    header[1 + names.index(field)] = value
    with pytest.raises(FrameError):
        decode(frame(header))


@pytest.mark.parametrize(
    ("dtype", "shape", "length"),
    [
        ("float32", [2, 3], 23),
        ("float32", [2, 3], 12),
        ("bfloat16", [2, 3], 24),
        ("float16", [2**24, 2**24, 2**24], 12),
        ("float16", [0, 6], 0),
        ("float16", [-2, -3], 12),
        ("float16", [], 2),
        ("float16", [1, 1, 2, 3], 12),
        ("int8", [12], 12),
    ],
)
def test_tensors_that_do_not_fit_their_header_are_refused(dtype, shape, length):
    with pytest.raises(FrameError):
        decode(frame([4, "s", 0, 0, 0, True, dtype, shape], bytes(length)))


def test_only_messages_with_a_tensor_have_a_body():
    with pytest.raises(FrameError, match="carries no data"):
        decode(encode(Close("s")) + b"x")


def test_deep_nesting_and_huge_declared_sizes_are_refused():
    for header in (
        b"\x91" * 60_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x92\x07\xc7\x05\x01hello",
        b"\x92\x07\xd6\xff\x00\x00\x00\x00",
        b"\x92\x07\xa1\xff",
    ):
        with pytest.raises(FrameError):
            decode(struct.pack(">I", len(header)) + header)


def test_limits_hold_in_both_directions():
    message = Hidden("s", 1, 0, 0, True, "float16", (50,), bytes(100))
    exact = Limits(frame=len(encode(message)), header=len(encode(message)) - 104)
    assert decode(encode(message, exact), exact) == message
    for limits in (Limits(frame=exact.frame - 1), Limits(header=exact.header - 1)):
        with pytest.raises(FrameError):
            encode(message, limits)
        with pytest.raises(FrameError):
            decode(encode(message), limits)


@pytest.mark.parametrize(
    "message",
    [
        Close("no session id"),
        Tokens("s", 0, 0, -1, (1,), True),
        Token("s", 0, 0, 0, 2**31, ""),
        Failed("s", 0, 0, "broken", "lone surrogate \ud800 in \N{SNOWMAN}"),
        Ping(2**64),
    ],
)
def test_what_the_other_side_would_refuse_is_not_sent(message):
    if isinstance(message, Failed):
        assert decode(encode(message)) == Failed("s", 0, 0, "broken", "lone surrogate  in \N{SNOWMAN}")
    else:
        with pytest.raises(FrameError):
            encode(message)


def test_reasons_are_cut_and_cleaned_rather_than_refused():
    reason = "\x1b[31mred\n" + "x" * 1000
    by_hand = frame([6, "s", 0, 0, "broken", reason, ""])
    for got in (decode(encode(Failed("s", 0, 0, "broken", reason))), decode(by_hand)):
        assert got == Failed("s", 0, 0, "broken", "[31mred" + "x" * 291)


def test_malformed_messages_cannot_be_made():
    with pytest.raises(FrameError):
        Hidden("s", 0, 0, 0, True, "float32", (2,), bytes(7))
    with pytest.raises(FrameError):
        Open("s", 2, 0, OPEN.stages, PEER, 1, 0.0, 1.0, 0, 0, (), 1, 1.0)
