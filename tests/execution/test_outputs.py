"""What a stage sent is kept: byte for byte, for all that a session has, and good for a successor to go on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from p2pllm.errors import BusyError, SessionError
from p2pllm.execution import Activation, Checkpoint, Executor, SamplingParams, open_checkpoint, reservations
from p2pllm.execution.attention import Segment
from p2pllm.execution.kv import private_caches

from .conftest import Slice, load_slice, random_model

LAYERS = 4
CONTEXT = 256
SIZES = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 20},
    "gemma3_text": {"sliding_window": 6},
    "gpt_oss": {"sliding_window": 20, "num_local_experts": 4, "num_experts_per_tok": 2},
}
"""No layer has a window, all have one (twice), and every other one."""
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Checkpoint, Any]]:
    made: dict[str, tuple[Path, Any]] = {}

    def make(kind: str) -> tuple[Checkpoint, Any]:
        if kind not in made:
            whole = random_model(AutoConfig.for_model(kind, **(SIZES | KINDS[kind])))
            whole.save_pretrained(directory := tmp_path_factory.mktemp(kind))
            made[kind] = directory, whole
        directory, whole = made[kind]
        return open_checkpoint(str(directory)), whole

    return make


@pytest.fixture
def _little_slack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows let go of what has left them much sooner."""
    monkeypatch.setattr(reservations, "_SLACK_TOKENS", 32)
    monkeypatch.setattr(reservations, "_AHEAD_TOKENS", 16)


async def loaded(checkpoint: Checkpoint, start: int, end: int, dtype: str = "float32") -> Executor:
    made = Executor(checkpoint, dtype=dtype, device="cpu", threads=1)
    await made.load(start, end, kv_bytes=1 << 20)
    return made


def rows_of(activation: Activation | None) -> list[bytes]:
    assert activation is not None
    size = len(activation.data) // activation.shape[0]
    return [activation.data[at : at + size] for at in range(0, len(activation.data), size)]


def names(text: list[int]) -> bytes:
    ends = range(16, len(text) + 1, 16)
    return b"".join(hash((0, *text[:end])).to_bytes(8, "big", signed=True) for end in ends)


@torch.inference_mode()
def logits_after(rest: Slice, rows: list[bytes]) -> Tensor:
    """(tokens, vocabulary), of these outputs run through the layers that come after."""
    hidden = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.float32).view(len(rows), -1)
    (cache,) = private_caches([len(rows)])
    return rest.stage.logits(rest.stage.forward([Segment(cache, 0, len(rows))], hidden, rest.start, rest.end))


@dataclass
class Modelled:
    """A session: its text, and for each token the bytes that `run` returned, None if it never did."""

    key: tuple[str, int]
    end: int
    beginning: list[int]
    text: list[int] = field(default_factory=list)
    rows: list[bytes | None] = field(default_factory=list)


class Story:
    """Sessions of layers [0, 2) and [0, 3) on one executor, and what all of them were told."""

    def __init__(self, executor: Executor, whole: Any, rests: dict[int, Slice] | None, seed: int) -> None:
        self.executor, self.whole, self.rests = executor, whole, rests
        self.rng = random.Random(seed)
        self.beginnings = [[self.rng.randrange(90) for _ in range(50)] for _ in range(2)]
        self.sessions: list[Modelled] = []
        self.told: dict[tuple[int, int, tuple[int, ...]], set[bytes]] = {}
        self.hits = self.unseen = 0

    async def open(self) -> None:
        it = Modelled((f"s{self.rng.random()}", 0), self.rng.choice([2, 3]), self.rng.choice(self.beginnings))
        try:
            cached = self.executor.reserve(
                it.key, start=0, end=it.end, tokens=80, prefix=names(it.beginning), owner="me"
            )
        except BusyError:
            return
        self.sessions.append(it)
        it.text = it.beginning[:cached]
        self.hits += cached > 0
        if cached:
            it.rows = list(rows_of(await self.executor.outputs(it.key, 0, cached)))
            for at, row in enumerate(it.rows):
                assert row in self.told[it.end, at, tuple(it.text[: at + 1])]

    async def run(self, it: Modelled, pieces: int = 1, *, turns: int | None = None) -> None:
        """Some rows at the end or, now and then, from further back; with ``turns`` it is taken back soon."""
        tasks = []
        length = len(it.rows)
        for _ in range(pieces):
            back = self.rng.choice([0, 0, 0, 1, 25, length]) if not tasks else 0
            position = max(0, length - back)
            count = min(CONTEXT - position, self.rng.choice([1, 1, 5, 20, 40]))
            new = [self.rng.randrange(90) for _ in range(count)]
            if self.rng.random() < 0.8:
                begun = it.beginning[position : position + count]
                new[: len(begun)] = begun
            if count:
                run = self.executor.run(it.key, position, new, sample=False)
                tasks.append((position, new, asyncio.ensure_future(run)))
                length = position + count
        text, rows = list(it.text), list(it.rows)
        if turns is not None:
            for _ in range(turns):
                await asyncio.sleep(0)
            wanted = self.rng.randrange(length + 10)
            held = await self.executor.take_back(it.key, wanted)
        outcomes = await asyncio.gather(*(task for *_, task in tasks), return_exceptions=True)
        for (position, new, _), outcome in zip(tasks, outcomes, strict=True):
            if isinstance(outcome, SessionError | BusyError) and "taken back" not in str(outcome):
                continue
            text[position:] = new
            if isinstance(outcome, BaseException):
                rows[position:] = [None] * len(new)
            else:
                rows[position:] = rows_of(outcome.activation)
                for at in range(position, len(rows)):
                    self.told.setdefault((it.end, at, tuple(text[: at + 1])), set()).add(rows[at] or b"")
        if turns is not None:
            assert held <= wanted
            del text[held:], rows[held:]
            self.unseen += None in rows
        it.text, it.rows = text, rows
        assert self.executor.length(it.key) == len(rows) == len(text)

    async def check(self, it: Modelled, start: int, end: int) -> None:
        got = rows_of(await self.executor.outputs(it.key, start, end))
        for at, row in enumerate(got, start):
            if it.rows[at] is None:
                it.rows[at] = row
                self.told.setdefault((it.end, at, tuple(it.text[: at + 1])), set()).add(row)
            assert row == it.rows[at], f"{at} of {len(it.rows)}"

    async def close(self, it: Modelled) -> None:
        if it.rows:
            await self.check(it, 0, len(it.rows))
            if self.rests is not None:
                got = logits_after(self.rests[it.end], [row or b"" for row in it.rows])
                want = self.whole(torch.tensor([it.text])).logits[0]
                assert (got - want).abs().max() <= 1e-4
        with pytest.raises(SessionError, match="not kept here"):
            await self.executor.outputs(it.key, 0, len(it.rows) + 1)
        self.executor.release(it.key, names(it.text))
        self.sessions.remove(it)

    async def tell(self, acts: int) -> None:
        for _ in range(acts):
            act, rng = self.rng.random(), self.rng
            if act < 0.2 and len(self.sessions) < 5:
                await self.open()
            elif not self.sessions:
                continue
            elif act < 0.5:
                some = rng.sample(self.sessions, rng.randrange(1, len(self.sessions) + 1))
                await asyncio.gather(*(self.run(it) for it in some))
            elif act < 0.8:
                await self.run(rng.choice(self.sessions), rng.randrange(4), turns=rng.randrange(1, 60))
            elif act < 0.86:
                it = rng.choice(self.sessions)
                if it.rows:
                    start = rng.randrange(len(it.rows))
                    await self.check(it, start, rng.randrange(start, len(it.rows)) + 1)
            else:
                await self.close(rng.choice(self.sessions))
        for it in list(self.sessions):
            await self.close(it)
        stats = self.executor.stats()
        assert stats.kv_blocks_free == stats.kv_blocks_total


@pytest.mark.usefixtures("_little_slack")
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, "float32") for kind in KINDS), ("llama", "bfloat16"), ("gpt_oss", "bfloat16")],
)
async def test_outputs_are_the_bytes_that_were_sent(
    kind: str, dtype: str, model: Callable[[str], tuple[Checkpoint, Any]]
) -> None:
    checkpoint, whole = model(kind)
    rests = {end: load_slice(checkpoint, end, LAYERS) for end in (2, 3)} if dtype == "float32" else None
    executor = await loaded(checkpoint, 0, 3, dtype)
    try:
        story = Story(executor, whole, rests, seed=5)
        with torch.inference_mode():
            await story.tell(140)
        assert story.hits
        assert story.unseen
    finally:
        await executor.close()


async def decode(executor: Executor, key: tuple[str, int], position: int, rows: list[bytes]) -> int | None:
    """The token that the last stage draws after these outputs of the one before it."""
    inputs = Activation("float32", (len(rows), 64), b"".join(rows))
    return (await executor.run(key, position, inputs, sample=True)).token


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
async def test_a_lost_successor_is_told_again_and_goes_on(
    kind: str, model: Callable[[str], tuple[Checkpoint, Any]]
) -> None:
    checkpoint, whole = model(kind)
    first = await loaded(checkpoint, 0, 2)
    lasts = [await loaded(checkpoint, 2, 4) for _ in range(2)]
    text = [(7 * n) % 97 for n in range(40)]
    first.reserve(("a", 0), start=0, end=2, tokens=60)
    for last in lasts:
        last.reserve(("a", 1), start=2, end=4, tokens=60, sampling=GREEDY)
    try:
        last, sent, position = lasts[0], text, 0
        for step in range(12):
            if step == 6:  # the successor is lost
                last = lasts[1]
                for start in range(0, position, 15):
                    told = await first.outputs(("a", 0), start, min(position, start + 15))
                    await last.run(("a", 1), start, told, sample=False)
            hidden = await first.run(("a", 0), position, sent, sample=False)
            position += len(sent)
            sent = [await decode(last, ("a", 1), position - len(sent), rows_of(hidden.activation))]
            text = [*text, *sent]
        with torch.inference_mode():
            logits = whole(torch.tensor([text])).logits[0]
        for at in range(40, len(text)):
            assert logits[at - 1].max() - logits[at - 1, text[at]] <= 1e-4
    finally:
        for executor in (first, *lasts):
            await executor.close()


@pytest.mark.usefixtures("_little_slack")
@pytest.mark.parametrize("beginning", [0, 32])
async def test_what_left_a_window_takes_a_session_back_to_what_it_began_with(
    beginning: int, model: Callable[[str], tuple[Checkpoint, Any]]
) -> None:
    checkpoint, whole = model("mistral")
    executor = await loaded(checkpoint, 0, 2)
    text = [(7 * n) % 97 for n in range(200)]
    try:
        key, prefix = ("a", 0), names(text[:beginning])
        executor.reserve(key, start=0, end=2, tokens=40)
        await executor.run(key, 0, text[:40], sample=False)
        executor.release(key, prefix)
        assert executor.reserve(key, start=0, end=2, tokens=40, prefix=prefix) == beginning
        for position in range(beginning, 200, 12):
            await executor.run(key, position, text[position : position + 12], sample=False)
        assert await executor.take_back(key, 180) == executor.length(key) == 180
        with pytest.raises(SessionError, match="out of a window"):
            await executor.run(key, 100, text[100:110], sample=False)
        assert await executor.take_back(key, 100) == beginning
        for start in range(beginning, 60, 7):
            await executor.run(key, start, text[start : start + 7], sample=False)
        rows = rows_of(await executor.outputs(key, 0, 60))
        got = logits_after(load_slice(checkpoint, 2, 4), rows)
        with torch.inference_mode():
            assert (got - whole(torch.tensor([text[:60]])).logits[0]).abs().max() <= 1e-4
        executor.release(key)
        assert executor.stats().kv_blocks_free == executor.stats().kv_blocks_total
    finally:
        await executor.close()


async def test_the_last_stage_keeps_nothing(model: Callable[[str], tuple[Checkpoint, Any]]) -> None:
    executor = await loaded(model("llama")[0], 0, 4)
    try:
        executor.reserve(("a", 0), start=0, end=4, tokens=64, sampling=GREEDY)
        await executor.run(("a", 0), 0, [1, 2, 3], sample=True)
        with pytest.raises(SessionError, match="the last stage"):
            await executor.outputs(("a", 0), 0, 3)
        assert set(executor._engine.store._slabs) == {0, 1, 2, 3}
        used = executor.stats().kv_bytes_used
        assert used == 4 * 64 * 128, "layers, tokens, and bytes of one's keys and values"
        executor.reserve(("b", 0), start=0, end=3, tokens=64)
        await executor.run(("b", 0), 0, [1, 2, 3], sample=False)
        assert executor.stats().kv_bytes_used - used == 3 * 64 * 128 + 64 * 256, "and of hidden states"
        assert len(executor._engine.store._slabs) == 5
        executor.release(("b", 0))
        with pytest.raises(SessionError, match="not open"):
            await executor.outputs(("b", 0), 0, 3)
    finally:
        await executor.close()


async def test_all_memory_is_used_and_no_more(model: Callable[[str], tuple[Checkpoint, Any]]) -> None:
    """16 blocks of 3 layers and of their outputs, which are twice as large as one layer's keys and values."""
    memory = 16 * 16 * 128 * (3 + 2)
    executor = Executor(model("llama")[0], dtype="float32", device="cpu", threads=1)
    try:
        await executor.load(0, 3, kv_bytes=memory)
        assert executor.stats().kv_blocks_total == 16
        for session, tokens in (("a", 240), ("b", 16)):
            executor.reserve((session, 0), start=0, end=3, tokens=tokens)
            await executor.run((session, 0), 0, [1] * tokens, sample=False)
        with pytest.raises(BusyError, match="5 blocks wanted, 0 of 80 free"):
            executor.reserve(("c", 0), start=0, end=3, tokens=1)
        slabs = executor._engine.store._slabs.values()
        assert sum(tensor.nbytes for slab in slabs for tensor in slab) == memory
    finally:
        await executor.close()


@pytest.mark.parametrize("is_taken_back", [False, True])
async def test_what_is_shared_and_about_to_be_written_over_is_copied_first(
    is_taken_back: bool, model: Callable[[str], tuple[Checkpoint, Any]]
) -> None:
    executor = await loaded(model("llama")[0], 0, 2)
    try:
        text = [(7 * n) % 97 for n in range(32)]
        executor.reserve(("a", 0), start=0, end=2, tokens=64)
        sent = rows_of((await executor.run(("a", 0), 0, text, sample=False)).activation)
        executor.release(("a", 0), names(text))
        for session in "bc":
            assert executor.reserve((session, 0), start=0, end=2, tokens=64, prefix=names(text)) == 32
        executor.reserve(("d", 0), start=0, end=2, tokens=256)
        await executor.run(("d", 0), 0, [1] * 256, sample=False)
        executor.release(("d", 0))  # so slabs are long enough for the copy
        run = asyncio.ensure_future(executor.run(("b", 0), 20, [9], sample=False))
        await asyncio.sleep(0)  # it is queued, and has its own second block
        if is_taken_back:
            assert await executor.take_back(("b", 0), 32) == 20
            run.exception()
        assert rows_of(await executor.outputs(("b", 0), 0, 20)) == sent[:20]
        if not is_taken_back:
            await run
        assert rows_of(await executor.outputs(("c", 0), 0, 32)) == sent
    finally:
        await executor.close()


async def test_a_session_released_meanwhile_is_not_taken_back(
    model: Callable[[str], tuple[Checkpoint, Any]],
) -> None:
    executor = await loaded(model("llama")[0], 0, 2)
    try:
        executor.reserve(("a", 0), start=0, end=2, tokens=64)
        run = asyncio.ensure_future(executor.run(("a", 0), 0, [1] * 40, sample=False))
        await asyncio.sleep(0)
        back = asyncio.ensure_future(executor.take_back(("a", 0), 20))
        await asyncio.sleep(0)
        executor.release(("a", 0))
        executor.reserve(("a", 0), start=0, end=2, tokens=64)
        with pytest.raises(SessionError, match="was released"):
            await back
        with pytest.raises(SessionError, match="taken back"):
            await run
    finally:
        await executor.close()
