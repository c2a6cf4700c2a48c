"""The executor: batching, sessions, blocks, and errors that hurt one session only."""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from p2pllm.errors import BusyError, ModelError, RequestError, SessionError
from p2pllm.execution import Activation, Checkpoint, Executor, SamplingParams, open_checkpoint
from p2pllm.execution.sampler import sample, uniform

PROMPT = [5, 17, 42, 8, 99, 23, 61, 3, 77, 12, 50, 31, 9, 88, 2, 71, 64, 33]
GREEDY = SamplingParams(temperature=0)
LAYERS = 4
BLOCK_BYTES = 16 * 2 * 2 * 16 * 4
"""16 tokens · keys and values · 2 KV heads · 16 dimensions · float32: a block of the tiny model."""


@pytest.fixture(scope="module")
def tiny(saved_model: Callable[[str], tuple[Path, Any]]) -> tuple[Checkpoint, Any]:
    directory, whole = saved_model("llama")
    return open_checkpoint(str(directory)), whole


def empty(checkpoint: Checkpoint) -> Executor:
    return Executor(checkpoint, dtype="float32", device="cpu", threads=1)


@asynccontextmanager
async def executor(
    checkpoint: Checkpoint, start: int = 0, end: int = LAYERS, blocks: int = 64
) -> AsyncIterator[Executor]:
    """A loaded executor with room for ``blocks`` blocks of all its layers, and of outputs that it sends."""
    made = empty(checkpoint)
    width = end - start + (end < LAYERS)  # an output is as large as keys and values of a layer
    try:
        await made.load(start, end, kv_bytes=blocks * width * BLOCK_BYTES)
        yield made
    finally:
        await made.close()


@torch.inference_mode()
def expected_tokens(whole: Any, prompt: list[int], params: SamplingParams, count: int) -> list[int]:
    """The whole model's own tokens, each from one pass over everything before it."""
    tokens = list(prompt)
    for _ in range(count):
        row = whole(torch.tensor([tokens])).logits[0, -1]
        tokens.append(sample(row, params, uniform(params.seed, len(tokens))))
    return tokens[len(prompt) :]


async def wait_until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until ``condition`` holds; each turn is one step of whatever else runs on it."""
    async with asyncio.timeout(10):
        while not condition():  # the executor has no event for what a test wants to see
            await asyncio.sleep(0)


async def generate(
    chain: list[Executor], session: str, prompt: list[int], params: SamplingParams, count: int
) -> list[int]:
    """Tokens of a session over executors that hold one slice each, the prompt in two chunks."""
    for index, stage in enumerate(chain):
        ((start, end),) = stage.slices
        stage.reserve((session, index), start=start, end=end, tokens=len(prompt), sampling=params)
    tokens: list[int] = []
    position = 0
    pieces = [prompt[:7], prompt[7:]]
    while len(tokens) < count:
        piece = pieces.pop(0)
        inputs: Any = piece
        for index, stage in enumerate(chain):
            is_wanted = stage is chain[-1] and not pieces
            output = await stage.run((session, index), position, inputs, sample=is_wanted)
            inputs = output.activation
        position += len(piece)
        if output.token is not None:
            tokens.append(output.token)
            pieces.append([output.token])
    for index, stage in enumerate(chain):
        stage.release((session, index))
    return tokens


@pytest.mark.parametrize("cuts", [(0, 4), (0, 1, 4), (0, 2, 3, 4)])
async def test_sessions_at_once_get_their_own_tokens(
    cuts: tuple[int, ...], tiny: tuple[Checkpoint, Any]
) -> None:
    checkpoint, whole = tiny
    cases = {
        "greedy": (PROMPT, GREEDY),
        "seeded": (PROMPT[3:], SamplingParams(temperature=1.3, top_p=0.9, seed=11)),
        "narrow": (PROMPT[::-1], SamplingParams(temperature=0.7, top_k=5, seed=12)),
    }
    async with AsyncExitStack() as stack:
        chain = [await stack.enter_async_context(executor(checkpoint, a, b)) for a, b in pairwise(cuts)]
        got = await asyncio.gather(*(generate(chain, name, *case, 24) for name, case in cases.items()))
        for (prompt, params), tokens in zip(cases.values(), got, strict=True):
            assert tokens == expected_tokens(whole, prompt, params, 24)
        for stage in chain:
            assert stage.stats().kv_blocks_free == stage.stats().kv_blocks_total


async def test_prefill_on_the_last_stage_gives_nothing_and_in_mid_model_all_rows(
    tiny: tuple[Checkpoint, Any],
) -> None:
    async with executor(tiny[0]) as whole:
        whole.reserve(("a", 0), start=0, end=4, tokens=32, sampling=GREEDY)
        output = await whole.run(("a", 0), 0, PROMPT, sample=False)
        assert (output.activation, output.token) == (None, None)
        whole.reserve(("a", 1), start=0, end=2, tokens=32)
        output = await whole.run(("a", 1), 0, PROMPT, sample=False)
        assert output.activation is not None
        assert output.activation.shape == (len(PROMPT), 64)
        assert len(output.activation.data) == len(PROMPT) * 64 * 4


async def test_going_back_takes_back_what_came_after(tiny: tuple[Checkpoint, Any]) -> None:
    async with executor(tiny[0]) as stage:
        stage.reserve(("a", 0), start=0, end=4, tokens=32, sampling=GREEDY)
        await stage.run(("a", 0), 0, PROMPT, sample=True)
        again = await stage.run(("a", 0), 10, PROMPT[10:], sample=True)
        assert again.token == expected_tokens(tiny[1], PROMPT, GREEDY, 1)[0]
        with pytest.raises(SessionError, match="position 19 is past the 18 tokens"):
            await stage.run(("a", 0), 19, [1], sample=False)


async def test_runs_of_a_session_queue_in_order(tiny: tuple[Checkpoint, Any]) -> None:
    async with executor(tiny[0]) as stage:
        stage.reserve(("a", 0), start=0, end=4, tokens=32, sampling=GREEDY)
        outputs = await asyncio.gather(
            stage.run(("a", 0), 0, PROMPT[:5], sample=False),
            stage.run(("a", 0), 5, PROMPT[5:6], sample=False),
            stage.run(("a", 0), 6, PROMPT[6:], sample=True),
        )
        assert outputs[-1].token == expected_tokens(tiny[1], PROMPT, GREEDY, 1)[0]


async def test_blocks_are_counted(tiny: tuple[Checkpoint, Any]) -> None:
    async with executor(tiny[0], blocks=4) as stage:
        assert stage.stats().kv_blocks_total == 4
        stage.reserve(("a", 0), start=0, end=4, tokens=17, sampling=GREEDY)
        assert stage.stats().kv_blocks_free == 2
        stage.reserve(("half", 0), start=0, end=2, tokens=16)  # and outputs: 3 blocks
        assert stage.stats().kv_blocks_free == 1
        with pytest.raises(BusyError):
            stage.reserve(("b", 0), start=0, end=4, tokens=17)
        await stage.run(("a", 0), 0, PROMPT, sample=False)
        await stage.run(("a", 0), 18, PROMPT, sample=False)  # 36 tokens need a third block
        assert stage.stats().kv_blocks_free == 0
        with pytest.raises(BusyError):
            await stage.run(("a", 0), 36, PROMPT, sample=False)
        await stage.run(("a", 0), 36, [1], sample=True)  # it lost nothing and goes on
        stage.release(("a", 0))
        stage.release(("half", 0))
        stage.release(("half", 0))  # once more does no harm
        assert stage.stats().kv_blocks_free == 4


async def test_a_cached_prefix_is_not_run_again(tiny: tuple[Checkpoint, Any]) -> None:
    checkpoint, whole = tiny
    text = [(7 * n) % 97 for n in range(40)]
    names = bytes(range(16))
    async with executor(checkpoint, 0, 2, blocks=8) as first, executor(checkpoint, 2, 4, blocks=8) as last:
        chain = ((first, 0, 2), (last, 2, 4))

        async def begin(session: str, owner: str, position: int | None = None) -> int | None:
            """The first token after the text, begun at ``position`` or with all that is cached."""
            cached = [
                stage.reserve(
                    (session, i), start=a, end=b, tokens=64, sampling=GREEDY, prefix=names, owner=owner
                )
                for i, (stage, a, b) in enumerate(chain)
            ]
            position = min(cached) if position is None else position
            inputs: Any = text[position:]
            for index, (stage, *_) in enumerate(chain):
                output = await stage.run((session, index), position, inputs, sample=stage is last)
                inputs = output.activation
            ran.append(len(text) - position)
            return output.token

        ran: list[int] = []
        (expected,) = expected_tokens(whole, text, GREEDY, 1)
        assert await begin("a", "me") == expected
        for index, (stage, *_) in enumerate(chain):
            stage.release(("a", index), names)
            assert (stage.stats().kv_blocks_free, stage.stats().kv_blocks_cached) == (8, 2)
        assert await begin("b", "me") == expected
        assert await begin("c", "me", 21) == expected  # which makes its own copy of the second block
        assert ran == [40, 8, 19]
        for index, (stage, *_) in enumerate(chain):
            assert stage.stats().kv_blocks_cached == 0
            for session in "bc":
                stage.release((session, index))
        assert await begin("d", "you") == expected
        assert ran[-1] == 40
        with pytest.raises(RequestError, match="8 bytes per block"):
            first.reserve(("e", 0), start=0, end=2, tokens=64, prefix=bytes(9))
        with pytest.raises(RequestError, match="64 at most"):
            first.reserve(("e", 0), start=0, end=2, tokens=64, prefix=bytes(72))
        for index, (stage, *_) in enumerate(chain):
            stage.release(("d", index))
            stage.reserve(("full", 0), start=2 * index, end=2 * index + 2, tokens=128)
            assert (stage.stats().kv_blocks_free, stage.stats().kv_blocks_cached) == (0, 0)


def row(values: list[float]) -> Activation:
    return Activation("float32", (1, 64), struct.pack("<64f", *(values * 64)[:64]))


BAD_HIDDEN = {
    "tokens": [1, 2],
    "width": Activation("float32", (1, 63), bytes(63 * 4)),
    "bytes": Activation("float32", (2, 64), bytes(64 * 4)),
    "dtype": Activation("int8", (1, 64), bytes(64)),
    "empty": Activation("float32", (0, 64), b""),
    "flat": Activation("float32", (64,), bytes(64 * 4)),
    "nan": row([1.0, float("nan")]),
    "infinite": row([float("inf")]),
}


@pytest.mark.parametrize("name", BAD_HIDDEN)
async def test_bad_hidden_states_hurt_only_their_session(name: str, tiny: tuple[Checkpoint, Any]) -> None:
    async with executor(tiny[0], 2, 4) as stage:
        for session in ("bad", "good"):
            stage.reserve((session, 1), start=2, end=4, tokens=16, sampling=GREEDY)
        alone = await stage.run(("good", 1), 0, row([0.5]), sample=True)
        bad, good = await asyncio.gather(
            stage.run(("bad", 1), 0, BAD_HIDDEN[name], sample=True),
            stage.run(("good", 1), 0, row([0.5]), sample=True),
            return_exceptions=True,
        )
        assert isinstance(bad, RequestError)
        assert good == alone
        assert await stage.run(("bad", 1), 0, row([0.5]), sample=True) == alone


@pytest.mark.parametrize("tokens", [[], [100], [-1], [3, 1 << 40], row([0.5])])
async def test_bad_tokens(tokens: Any, tiny: tuple[Checkpoint, Any]) -> None:
    async with executor(tiny[0]) as stage:
        stage.reserve(("a", 0), start=0, end=4, tokens=16, sampling=GREEDY)
        with pytest.raises(RequestError):
            await stage.run(("a", 0), 0, tokens, sample=True)
        await stage.run(("a", 0), 0, PROMPT, sample=True)


async def test_rows_after_a_failed_chunk_fail_too(tiny: tuple[Checkpoint, Any]) -> None:
    async with executor(tiny[0], 2, 4) as stage:
        stage.reserve(("a", 1), start=2, end=4, tokens=16, sampling=GREEDY)
        bad, after = await asyncio.gather(
            stage.run(("a", 1), 0, BAD_HIDDEN["nan"], sample=False),
            stage.run(("a", 1), 1, row([0.5]), sample=True),
            return_exceptions=True,
        )
        assert isinstance(bad, RequestError)
        assert isinstance(after, SessionError)


async def test_requests_that_can_never_be_served(tiny: tuple[Checkpoint, Any]) -> None:
    async with executor(tiny[0], 1, 3) as stage:
        for start, end, tokens in ((-1, 3, 16), (1, 5, 16), (2, 2, 16), (1, 3, 0), (1, 3, 129)):
            with pytest.raises(RequestError):
                stage.reserve(("a", 0), start=start, end=end, tokens=tokens)
        for start, end in ((0, 3), (1, 4), (0, 1)):
            with pytest.raises(BusyError, match=r"not here \(but 1:3\)"):
                stage.reserve(("a", 0), start=start, end=end, tokens=16)
        for params in (
            SamplingParams(temperature=-1),
            SamplingParams(temperature=float("nan")),
            SamplingParams(top_p=0),
            SamplingParams(top_p=1.1),
            SamplingParams(top_k=-1),
        ):
            with pytest.raises(RequestError):
                stage.reserve(("a", 0), start=1, end=3, tokens=16, sampling=params)
        stage.reserve(("a", 0), start=1, end=3, tokens=16, sampling=GREEDY)
        with pytest.raises(SessionError, match="already open"):
            stage.reserve(("a", 0), start=1, end=3, tokens=16)
        with pytest.raises(RequestError, match="cannot sample"):
            await stage.run(("a", 0), 0, row([0.5]), sample=True)
        with pytest.raises(SessionError, match="not open"):
            await stage.run(("b", 0), 0, row([0.5]), sample=False)
        with pytest.raises(RequestError, match="context of 128"):
            await stage.run(("a", 0), 0, Activation("float32", (129, 64), bytes(129 * 64 * 4)), sample=False)


async def test_release_frees_at_once_and_fails_what_waits_and_runs(tiny: tuple[Checkpoint, Any]) -> None:
    async with executor(tiny[0]) as stage:
        stage.reserve(("a", 0), start=0, end=4, tokens=64, sampling=GREEDY)
        stage.reserve(("b", 0), start=0, end=4, tokens=64, sampling=GREEDY)
        runs = [
            asyncio.ensure_future(stage.run(("a", 0), 0, PROMPT, sample=False)),
            asyncio.ensure_future(stage.run(("a", 0), len(PROMPT), [1], sample=True)),
            asyncio.ensure_future(stage.run(("b", 0), 0, PROMPT, sample=True)),
        ]
        await wait_until(lambda: stage.stats().running > 0)
        stage.release(("a", 0))
        assert stage.stats().kv_blocks_free == stage.stats().kv_blocks_total - 4
        first, second, other = await asyncio.gather(*runs, return_exceptions=True)
        assert isinstance(first, SessionError)
        assert isinstance(second, SessionError)
        assert other.token == expected_tokens(tiny[1], PROMPT, GREEDY, 1)[0]


async def test_close_fails_what_waits_and_leaves_no_thread(tiny: tuple[Checkpoint, Any]) -> None:
    before = set(threading.enumerate())
    async with executor(tiny[0]) as stage:
        stage.reserve(("a", 0), start=0, end=4, tokens=64, sampling=GREEDY)
        run = asyncio.ensure_future(stage.run(("a", 0), 0, PROMPT, sample=True))
        await asyncio.sleep(0)
    with pytest.raises(SessionError):
        await run
    assert set(threading.enumerate()) == before


async def test_close_in_the_middle_of_loading(tiny: tuple[Checkpoint, Any]) -> None:
    before = set(threading.enumerate())
    stage = empty(tiny[0])
    loading = [asyncio.ensure_future(stage.load(a, b, kv_bytes=1 << 20)) for a, b in ((0, 2), (2, 4))]
    await asyncio.sleep(0)
    await stage.close()
    for load in loading:
        with pytest.raises(ModelError, match="stopped"):
            await load
    assert set(threading.enumerate()) == before


async def test_an_unexpected_failure_hurts_one_session(
    tiny: tuple[Checkpoint, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when memory runs out: the batch is tried again one by one, and only the culprit fails."""
    from p2pllm.execution.stage import Stage

    async with executor(tiny[0]) as stage:
        right = Stage.forward

        def forward(self: Stage, segments: Any, inputs: torch.Tensor, start: int, end: int) -> torch.Tensor:
            if 13 in inputs:
                raise RuntimeError("out of memory")
            return right(self, segments, inputs, start, end)

        monkeypatch.setattr(Stage, "forward", forward)
        for session in ("bad", "good"):
            stage.reserve((session, 0), start=0, end=4, tokens=32, sampling=GREEDY)
        bad, good = await asyncio.gather(
            stage.run(("bad", 0), 0, [13, 4], sample=True),
            stage.run(("good", 0), 0, PROMPT, sample=True),
            return_exceptions=True,
        )
        assert isinstance(bad, SessionError)
        assert "out of memory" in str(bad)
        assert good.token == expected_tokens(tiny[1], PROMPT, GREEDY, 1)[0]


async def test_a_bug_is_no_hang(tiny: tuple[Checkpoint, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """If the worker breaks in a way nobody foresaw, callers hear of it, and closing shows the traceback."""
    from p2pllm.execution import step

    before = set(threading.enumerate())
    stage = empty(tiny[0])
    await stage.load(0, 4, kv_bytes=1 << 20)
    stage.reserve(("a", 0), start=0, end=4, tokens=32, sampling=GREEDY)
    monkeypatch.setattr(step, "run_step", lambda *_: 1 / 0)
    for _ in range(2):
        with pytest.raises(SessionError):
            await stage.run(("a", 0), 0, PROMPT, sample=True)
    with pytest.raises(ZeroDivisionError):
        await stage.watch()
    with pytest.raises(ZeroDivisionError):
        await stage.close()
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("out of memory"), ValueError("odd")])
async def test_what_one_step_raises_costs_its_sessions_alone(
    tiny: tuple[Checkpoint, Any], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    from p2pllm.execution import step

    def fail(*_: object) -> None:
        raise error

    async with executor(tiny[0], 0, 4) as stage:
        stage.reserve(("a", 0), start=0, end=4, tokens=32, sampling=GREEDY)
        for broken in ("_forward", "_inputs"):
            with monkeypatch.context() as patch:
                patch.setattr(step, broken, fail)
                with pytest.raises(SessionError, match="the forward pass failed"):
                    await stage.run(("a", 0), 0, PROMPT, sample=True)
        assert (await stage.run(("a", 0), 0, PROMPT, sample=True)).token is not None


async def test_stats_are_measured_from_the_start(tiny: tuple[Checkpoint, Any]) -> None:
    async with executor(tiny[0], 0, 2) as first, executor(tiny[0], 2, 4) as last:
        assert first.stats().layer_s > 0
        assert first.stats().head_s == 0
        assert last.stats().layer_s > 0
        assert last.stats().head_s > 0
        assert last.stats().wait_s == 0
        layer = tiny[0].layer_bytes("float32")
        assert first.stats().weight_bytes == 2 * layer + tiny[0].embed_bytes("float32")
        assert last.stats().weight_bytes == 2 * layer + tiny[0].head_bytes("float32")


async def test_no_room_for_kv_is_an_error_at_load(tiny: tuple[Checkpoint, Any]) -> None:
    with pytest.raises(ModelError, match="no room for KV"):
        async with executor(tiny[0], blocks=0):
            pass


async def test_progress_is_heard_on_the_loop(tiny: tuple[Checkpoint, Any]) -> None:
    heard: list[tuple[int, int]] = []
    stage = empty(tiny[0])
    try:
        await stage.load(0, 4, kv_bytes=1 << 20, progress=lambda *call: heard.append(call))
        assert heard == sorted(heard)
        assert heard[-1] == (stage.stats().weight_bytes, stage.stats().weight_bytes)
    finally:
        await stage.close()
