"""The executor changes its layers while it serves: nothing is read twice, nobody waits, what goes is gone."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from p2pllm.errors import BusyError, ModelError, SessionError
from p2pllm.execution import Activation, Checkpoint, Executor, SamplingParams, open_checkpoint
from p2pllm.execution.safetensors_files import SafetensorsCheckpoint

PROMPT = [5, 17, 42, 8, 99, 23, 61]
GREEDY = SamplingParams(temperature=0)
LAYERS = 4
BLOCK_BYTES = 16 * 2 * 2 * 16 * 4
"""16 tokens · keys and values · 2 KV heads · 16 dimensions · float32: a block of the tiny model."""
KV_BYTES = 64 * BLOCK_BYTES


@pytest.fixture(scope="module")
def tiny(saved_model: Callable[[str], tuple[Path, Any]]) -> tuple[Checkpoint, Any]:
    directory, whole = saved_model("llama")
    return open_checkpoint(str(directory)), whole


@asynccontextmanager
async def holding(checkpoint: Checkpoint, *slices: tuple[int, int]) -> AsyncIterator[Executor]:
    made = Executor(checkpoint, dtype="float32", device="cpu", threads=1)
    before = set(threading.enumerate())
    try:
        for start, end in slices:
            await made.load(start, end, kv_bytes=KV_BYTES)
        yield made
    finally:
        await made.close()
        assert set(threading.enumerate()) == before


class Reads:
    """Which tensors are read; ``gate`` holds the next one up, ``error`` lets it fail."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    @property
    def layers(self) -> set[int | str]:
        """Layers that were read, by number, and whatever else by name."""
        return {int(name.split(".")[2]) if ".layers." in name else name for name in self.names}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    watched = Reads()
    right = SafetensorsCheckpoint.read

    def read(self: SafetensorsCheckpoint, name: str) -> Any:
        watched.names.append(name)
        assert watched.gate.wait(30)
        if watched.error is not None:
            raise watched.error
        return right(self, name)

    monkeypatch.setattr(SafetensorsCheckpoint, "read", read)
    yield watched
    watched.gate.set()


@torch.inference_mode()
def next_token(whole: Any, tokens: list[int]) -> int:
    return int(whole(torch.tensor([tokens])).logits[0, -1].argmax())


async def through(session: str, tokens: list[int], *stages: tuple[Executor, int, int]) -> int | None:
    """Run a prompt through sessions of these executors, and draw a token if they end with the model."""
    inputs: Any = tokens
    token = None
    for index, (executor, start, end) in enumerate(stages):
        executor.reserve((session, index), start=start, end=end, tokens=len(tokens), sampling=GREEDY)
        output = await executor.run((session, index), 0, inputs, sample=end == LAYERS)
        inputs, token = output.activation, output.token
        executor.release((session, index))
    return token


async def test_layers_come_and_go_and_none_is_read_twice(tiny: tuple[Checkpoint, Any], reads: Reads) -> None:
    checkpoint, whole = tiny
    expected = next_token(whole, PROMPT)
    async with holding(checkpoint, (1, 3)) as executor:
        assert (executor.slices, reads.layers) == (((1, 3),), {1, 2})
        with pytest.raises(BusyError, match=r"layers 0:4 are not here \(but 1:3\)"):
            await through("a", PROMPT, (executor, 0, 4))

        reads.names.clear()
        await executor.load(0, 4, kv_bytes=KV_BYTES)
        assert reads.layers == {0, 3, "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
        assert await through("b", PROMPT, (executor, 0, 4)) == expected

        await executor.drop(1, 3, kv_bytes=KV_BYTES)
        assert executor.slices == ((0, 1), (3, 4))
        assert [executor.holds(*span) for span in ((0, 1), (3, 4), (0, 2), (0, 4), (2, 3), (1, 1))] == (
            [True, True, False, False, False, False]
        )
        async with holding(checkpoint, (1, 3)) as other:
            chain = ((executor, 0, 1), (other, 1, 3), (executor, 3, 4))
            assert await through("c", PROMPT, *chain) == expected

        reads.names.clear()
        heard: list[tuple[int, int]] = []
        await executor.load(0, 3, kv_bytes=KV_BYTES, progress=lambda *call: heard.append(call))
        assert reads.layers == {1, 2}
        assert heard[-1] == (2 * checkpoint.layer_bytes("float32"),) * 2
        assert await through("d", PROMPT, (executor, 0, 2), (executor, 2, 4)) == expected


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
async def test_any_order_of_changes(kind: str, saved_model: Callable[[str], tuple[Path, Any]]) -> None:
    """Against a set of layers and the sizes that the checkpoint names; qwen2 has a tied head."""
    directory, whole = saved_model(kind)
    checkpoint = open_checkpoint(str(directory))
    layer, embed, head = (
        checkpoint.layer_bytes("float32"),
        checkpoint.embed_bytes("float32"),
        checkpoint.head_bytes("float32"),
    )
    rng = random.Random(3)
    held: set[int] = set()
    async with holding(checkpoint) as executor:
        for turn in range(24):
            start = rng.randrange(LAYERS)
            end = rng.randrange(start, LAYERS) + 1
            if rng.random() < 0.6:
                await executor.load(start, end, kv_bytes=KV_BYTES)
                held |= set(range(start, end))
            else:
                await executor.drop(start, end, kv_bytes=KV_BYTES)
                held -= set(range(start, end))
            assert {index for a, b in executor.slices for index in range(a, b)} == held
            shared = embed if checkpoint.tied and {0, 3} <= held else 0
            ends = (embed if 0 in held else 0) + (head if 3 in held else 0) - shared
            assert executor.stats().weight_bytes == len(held) * layer + ends
            assert (executor.stats().head_s > 0) == (3 in held)
            if len(held) == LAYERS:
                assert await through(f"s{turn}", PROMPT, (executor, 0, 4)) == next_token(whole, PROMPT)


async def test_sessions_go_on_while_layers_are_read(tiny: tuple[Checkpoint, Any], reads: Reads) -> None:
    async with holding(tiny[0], (0, 2)) as executor:
        executor.reserve(("a", 0), start=0, end=2, tokens=64)
        reads.gate.clear()
        reads.names.clear()
        loading = asyncio.create_task(executor.load(2, 4, kv_bytes=KV_BYTES))
        while not reads.names:
            await asyncio.sleep(0)
        for position, token in enumerate(PROMPT):
            await executor.run(("a", 0), position, [token], sample=False)
        assert not executor.holds(2, 3), "a layer is there when all of it is"
        reads.gate.set()
        while not loading.done():
            await executor.run(("a", 0), 0, PROMPT, sample=False)
        await loading
        assert executor.slices == ((0, 4),)
        assert executor.sessions(0, 1) == executor.sessions(1, 4) == 1
        assert executor.sessions(2, 4) == 0


async def test_dropped_layers_end_their_sessions_and_are_gone(tiny: tuple[Checkpoint, Any]) -> None:
    async with holding(tiny[0], (0, 4)) as executor:
        for name, start, end in (("low", 0, 2), ("across", 0, 4), ("high", 3, 4)):
            executor.reserve((name, 0), start=start, end=end, tokens=32, sampling=GREEDY)
        assert await through("used", PROMPT, (executor, 0, 4)) is not None
        loader = executor._engine._loader
        assert loader is not None
        weights = {name: weakref.ref(value) for name, value in loader._model.kept().items()}
        run = asyncio.create_task(executor.run(("across", 0), 0, PROMPT, sample=True))
        await asyncio.sleep(0)

        await executor.drop(1, 3, kv_bytes=KV_BYTES)
        with pytest.raises(SessionError, match="layers 1:3 were dropped"):
            await run
        for name in ("low", "across"):
            with pytest.raises(SessionError, match="not open"):
                await executor.run((name, 0), 0, PROMPT, sample=False)
        assert executor.sessions(0, 4) == 1
        # Of two layers, and the outputs of the lower one, which a session of the upper one does not keep.
        assert executor.stats().kv_blocks_free == (64 - 2) // 3
        executor.release(("high", 0))
        gc.collect()
        gone = {name for name, value in weights.items() if value() is None}
        assert gone == {name for name in weights if ".layers.1." in name or ".layers.2." in name}


@pytest.mark.parametrize("error", [ModelError, OSError, MemoryError, RuntimeError])
async def test_a_load_that_fails_leaves_all_as_it_was(
    tiny: tuple[Checkpoint, Any], reads: Reads, error: type[Exception]
) -> None:
    async with holding(tiny[0], (0, 2)) as executor:
        executor.reserve(("a", 0), start=0, end=2, tokens=32)
        before = executor.stats()
        reads.error = error("the disk is gone")
        with pytest.raises(ModelError, match="the disk is gone"):
            await executor.load(2, 4, kv_bytes=KV_BYTES // 2)
        reads.error = None
        with pytest.raises(ModelError, match="no room for KV cache: 4 layers"):
            await executor.load(2, 4, kv_bytes=3 * BLOCK_BYTES)
        with pytest.raises(ModelError, match="has layers 0:4, not 2:5"):
            await executor.load(2, 5, kv_bytes=KV_BYTES)
        assert (executor.stats(), executor.slices) == (before, ((0, 2),))
        await executor.run(("a", 0), 0, PROMPT, sample=False)
        reads.names.clear()
        await executor.load(2, 4, kv_bytes=KV_BYTES)
        assert reads.layers >= {2, 3}, "what was read before the failure is not kept"


async def test_a_load_can_be_cancelled(tiny: tuple[Checkpoint, Any], reads: Reads) -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with holding(tiny[0], (0, 2)) as executor:
        before = executor.stats()
        reads.gate.clear()
        reads.names.clear()
        loading = asyncio.create_task(executor.load(2, 4, kv_bytes=KV_BYTES))
        while not reads.names:
            await asyncio.sleep(0)
        loading.cancel()
        await asyncio.sleep(0)
        reads.gate.set()
        await asyncio.wait([loading])
        assert loading.cancelled()
        del loading
        gc.collect()
        assert complaints == [], "cancellation is not an error"
        assert len(reads.names) == 1, "it stops at the tensor it is at"
        assert executor._engine.weight_bytes() == before.weight_bytes
        await executor.load(2, 4, kv_bytes=KV_BYTES)
        assert executor.slices == ((0, 4),)


async def test_closing_stops_a_load_at_its_next_tensor(tiny: tuple[Checkpoint, Any], reads: Reads) -> None:
    async with holding(tiny[0], (0, 2)) as executor:
        reads.gate.clear()
        reads.names.clear()
        loads = [asyncio.create_task(executor.load(a, b, kv_bytes=KV_BYTES)) for a, b in ((2, 3), (3, 4))]
        while not reads.names:
            await asyncio.sleep(0)
        closing = asyncio.create_task(executor.close())
        await asyncio.sleep(0)
        reads.gate.set()
        await closing
        for load in loads:
            with pytest.raises(ModelError, match="stopped"):
                await load
        assert len(reads.names) == 1


async def test_the_pool_may_shrink_below_what_sessions_have(
    tiny: tuple[Checkpoint, Any], reads: Reads
) -> None:
    async with holding(tiny[0], (2, 4)) as executor:
        for name in "abcdefgh":
            executor.reserve((name, 0), start=2, end=4, tokens=64)  # 8 blocks each: all 64
        reads.gate.clear()
        loading = asyncio.create_task(executor.load(0, 2, kv_bytes=16 * BLOCK_BYTES))
        await asyncio.sleep(0)
        assert executor.stats().kv_blocks_total == 8, "its memory is for weights from the start"
        reads.gate.set()
        await loading
        assert (executor.stats().kv_blocks_total, executor.stats().kv_blocks_free) == (4, 0)
        for name in "abcdef":
            executor.release((name, 0))
            with pytest.raises(BusyError):
                executor.reserve(("new", 0), start=0, end=1, tokens=1)
        executor.release(("g", 0))
        executor.reserve(("new", 0), start=0, end=4, tokens=32)
        await executor.run(("h", 0), 0, Activation("float32", (1, 64), bytes(64 * 4)), sample=False)
        executor.release(("h", 0))
        assert executor.stats().kv_blocks_free == 2


async def test_threads_of_steps_and_of_reading(tiny: tuple[Checkpoint, Any]) -> None:
    """torch's number is partly of a thread, partly of the process: reading must not take it from steps."""
    executor = Executor(tiny[0], dtype="float32", device="cpu", threads=2)
    try:
        await executor.load(0, 1, kv_bytes=KV_BYTES)
        engine = executor._engine
        found = [await worker.run(torch.get_num_threads) for worker in (engine._stepping, engine._reading)]
        assert found == [2, 1]
    finally:
        await executor.close()
        torch.set_num_threads(1)
