"""What stages keep of a text, and when the next session may begin behind it."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.wires import CONTEXT, GREEDY, SECRET, A, B, C, Wires, chain, collect, expected, settled

from p2pllm.scheduling import Chain, PeerId, Stage
from p2pllm.serving.entry.affinity import Kept
from p2pllm.serving.entry.generation import Generation
from p2pllm.serving.entry.prefix import prefix_names, upstream_name
from p2pllm.transport import Close, Message, Opened, Tokens

texts = st.lists(st.integers(0, 2**31 - 1), max_size=80)


def fed(network: Wires) -> list[tuple[int, int]]:
    """(position, tokens) of what the entry has fed since the last look."""
    found = [(it.position, len(it.tokens)) for _, _, it in network.sent if isinstance(it, Tokens)]
    network.sent.clear()
    return found


async def talk(network: Wires, prompt: Sequence[int], count: int = 8, entry: PeerId = C) -> list[int]:
    tokens = await collect(network.entry(entry, chain((A, 0, 3), (B, 3, 6))), prompt, count)
    assert tokens == expected(prompt, count)
    await settled(network)
    return tokens


@pytest.fixture
def two_stages() -> Wires:
    return Wires({A: (0, 3), B: (3, 6), C: (0, 1)})


async def test_the_next_turn_feeds_only_what_is_new(two_stages: Wires) -> None:
    async with two_stages.running():
        first = [*range(40)]
        answer = await talk(two_stages, first)
        assert fed(two_stages) == [(0, 40)]
        # 47 tokens went through all stages, the last one of the answer through none: two blocks are full.
        await talk(two_stages, [*first, *answer, 5, 6, 7])
        assert fed(two_stages) == [(32, 19)]
        await talk(two_stages, [9, *first])
        assert fed(two_stages) == [(0, 41)]


async def test_the_next_turn_goes_where_the_last_one_went(two_stages: Wires) -> None:
    asked: list[Kept] = []
    generator = two_stages.entry(C, chain((A, 0, 3), (B, 3, 6)))
    find = generator._router.chain

    def chain_of(*, kept: Kept, **more: Any) -> Chain:
        asked.append(kept)
        return find(**more)

    generator._router.chain = chain_of  # type: ignore[method-assign]
    prompt, there = [*range(40)], (Stage(A, 0, 3), Stage(B, 3, 6))
    async with two_stages.running():
        answer = await collect(generator, prompt, 60)
        # Of 100 tokens all but the last were fed: six blocks of the whole, two of the prompt.
        for text, kept in (
            ([*prompt, *answer, 5], Kept(there, 96)),
            (prompt, Kept(there, 32)),
            ([7, *prompt], Kept()),
        ):
            before = generator.cached_tokens
            await collect(generator, text, 1)
            assert asked[-1] == kept
            assert generator.cached_tokens - before == kept.tokens
    assert generator.prompt_tokens == 40 + 101 + 40 + 41


async def test_a_text_that_is_all_there_still_needs_its_last_token(two_stages: Wires) -> None:
    async with two_stages.running():
        await talk(two_stages, [3] * 32)
        await talk(two_stages, [3] * 32)
        assert fed(two_stages) == [(0, 32), (31, 1)]


async def test_who_has_kept_more_than_the_next_stage_sends_it_once_more(two_stages: Wires) -> None:
    first, last = two_stages.executors[A], two_stages.executors[B]
    async with two_stages.running():
        await talk(two_stages, [*range(60)])
        kept = last.kept
        for name in [name for name in kept if len(kept[name]) > 32]:
            del kept[name]
        two_stages.sent.clear()
        first.computed = last.computed = 0
        await talk(two_stages, [*range(60)], 1)
        assert fed(two_stages) == [(48, 12)]
        assert (first.computed, last.computed) == (12, 12 + 16)
        kept.clear()
        await talk(two_stages, [*range(60)], 1)
        assert fed(two_stages) == [(48, 12)]
        assert (first.computed, last.computed) == (24, 28 + 60)


async def test_what_the_first_stage_lacks_is_fed_to_it_and_not_passed_on(two_stages: Wires) -> None:
    first, last = two_stages.executors[A], two_stages.executors[B]
    async with two_stages.running():
        await talk(two_stages, [*range(60)])
        first.kept.clear()
        first.computed = last.computed = 0
        two_stages.sent.clear()
        await talk(two_stages, [*range(60)], 1)
        assert fed(two_stages) == [(0, 60)]
        assert (first.computed, last.computed) == (60, 12)


async def test_texts_are_shared_with_no_other_entry_and_no_other_numerics(two_stages: Wires) -> None:
    async with two_stages.running():
        await talk(two_stages, [*range(50)])
        await talk(two_stages, [*range(50)], entry=A)
        assert fed(two_stages) == [(0, 50)] * 2
        two_stages.numerics[A] = "bfloat16/none"  # what B gets is rounded otherwise
        two_stages.executors[B].computed = 0
        await talk(two_stages, [*range(50)], 1)
        assert two_stages.executors[B].computed == 50


async def test_a_stage_that_claims_to_have_what_it_has_not_is_left() -> None:
    network = Wires({A: (0, 6), B: (0, 6)})

    def lie(sender: PeerId, message: Message) -> Message:
        is_claim = isinstance(message, Opened) and sender == A
        return replace(message, held=10**6) if is_claim else message  # type: ignore[arg-type]

    network.tamper = lie
    async with network.running():
        generator = network.entry(B, chain((A, 0, 6)), chain((B, 0, 6)))
        assert await collect(generator, [*range(20)], 5) == expected([*range(20)], 5)
        await settled(network)


async def test_a_close_that_names_too_much_frees_the_seat(two_stages: Wires) -> None:
    def swell(_sender: PeerId, message: Message) -> Message:
        return replace(message, prefix=bytes(8 * CONTEXT)) if isinstance(message, Close) else message

    two_stages.tamper = swell
    async with two_stages.running():
        await talk(two_stages, [*range(20)])
        assert all(stages.sessions == 0 for stages in two_stages.stages.values())


async def test_an_answer_that_is_broken_off_keeps_what_was_fed(two_stages: Wires) -> None:
    async with two_stages.running():
        stream = two_stages.entry(C, chain((A, 0, 3), (B, 3, 6))).generate(
            Generation((*range(33),), GREEDY, 50)
        )
        await anext(stream)
        await stream.aclose()
        await settled(two_stages)
        two_stages.sent.clear()
        await talk(two_stages, [*range(33)])
        assert fed(two_stages) == [(32, 1)]


@given(texts, st.integers(0, 80))
def test_names_stand_for_all_before_them(tokens: list[int], cut: int) -> None:
    whole = prefix_names(tokens, SECRET)
    assert len(whole) == 8 * (len(tokens) // 16)
    assert whole.startswith(prefix_names(tokens[:cut], SECRET))
    if len(tokens) >= 16:
        changed = prefix_names([tokens[0] ^ 1, *tokens[1:]], SECRET)
        pairs = zip(range(0, len(whole), 8), range(8, len(whole) + 1, 8), strict=True)
        assert not any(whole[start:end] == changed[start:end] for start, end in pairs)
        assert whole[:8] != prefix_names(tokens, bytes(32))[:8]


def test_names_by_hand() -> None:
    first = hashlib.blake2b(struct.pack("<16I", *range(16)), digest_size=16, key=SECRET).digest()
    second = first + struct.pack("<16I", *range(16, 32))
    second = hashlib.blake2b(second, digest_size=16, key=SECRET).digest()
    assert prefix_names(range(40), SECRET) == first[:8] + second[:8]


def test_what_is_upstream_has_a_name() -> None:
    one, other = Stage(A, 0, 3), Stage(B, 0, 4)
    found = {upstream_name(stages) for stages in ([], [(one, "x")], [(one, "y")], [(other, "x")])}
    assert len(found) == 4
    assert upstream_name([(one, "x")]) == upstream_name([(Stage(C, 0, 3), "x")]), "who it is does not matter"
