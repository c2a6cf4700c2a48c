"""Which work goes into which step: decoding sessions always, prompts in pieces and in turns."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from p2pllm.errors import BusyError, SessionError
from p2pllm.execution import Activation, SamplingParams, StageOutput
from p2pllm.execution import work_queue as module
from p2pllm.execution.job import Session
from p2pllm.execution.kv import private_caches
from p2pllm.execution.reservations import Reservations
from p2pllm.execution.work import Work
from p2pllm.execution.work_queue import WorkQueue

GREEDY = SamplingParams(temperature=0)


def session(owner: str = "") -> Session:
    kv = Reservations()
    kv.resize(1000, 1)
    (cache,) = private_caches([16])
    return Session(cache, kv.open(0, 1, 16, owner, []), GREEDY)


def hidden(rows: int) -> Activation:
    """Two bytes to a row, that say which it is."""
    return Activation("float16", (rows, 1), b"".join(i.to_bytes(2, "big") for i in range(rows)))


def echo(works: list[Work]) -> list[StageOutput]:
    """As a stage that changes nothing would answer."""
    outputs = []
    for work in works:
        work.cache.length = work.position + work.count
        activation = work.inputs if isinstance(work.inputs, Activation) else None
        outputs.append(StageOutput(activation, 5 if work.sampling else None))
    return outputs


async def test_a_long_prompt_goes_in_pieces_and_comes_back_whole() -> None:
    queue = WorkQueue()
    prompt, chat = session(), session()
    run = queue.add(prompt, 0, hidden(700), sample=False)
    after = queue.add(prompt, 700, hidden(2), sample=False)
    seen = []
    for step in itertools.count():
        works = await queue.take()
        if step == 1:
            decoded = queue.add(chat, 0, [3], sample=True)
        seen.append([(work.position, work.count, work.sampling) for work in works])
        queue.finish(echo(works), 0.1)
        if after.done():
            break
    assert (await run).activation == hidden(700)
    assert (await after).activation == hidden(2)
    assert (await decoded).token == 5
    assert seen == [[(0, 512, None)], [(512, 188, None)], [(0, 1, GREEDY), (700, 2, None)]]
    assert (queue.waiting, queue.running) == (0, 0)
    totals = queue.totals
    assert (totals.steps, totals.tokens, totals.runs) == (3, 703, 3)


async def test_beside_a_chat_prompts_take_turns_with_few_rows_each() -> None:
    queue = WorkQueue()
    chat, one, two = session(), session(), session()
    runs = [queue.add(it, 0, [1] * 200, sample=True) for it in (one, two)]
    served = []
    for step in range(60):
        decoded = queue.add(chat, step, [3], sample=True)
        works = await queue.take()
        assert works[0].cache is chat.cache
        assert sum(work.count for work in works) <= 65
        served.append([work.cache for work in works[1:]])
        queue.finish(echo(works), 0.01 + 0.01 * (len(works) > 1))
        assert decoded.done()
        if all(run.done() for run in runs):
            break
    assert [it.token for it in await asyncio.gather(*runs)] == [5, 5]
    assert served[0] == [one.cache]
    assert served[1] == [two.cache]


async def test_an_error_ends_a_run_in_its_middle() -> None:
    queue = WorkQueue()
    it = session()
    run = queue.add(it, 0, [1] * 600, sample=True)
    it.length = 600
    await queue.take()
    queue.finish([SessionError("broken")], 0.1)
    with pytest.raises(SessionError, match="broken"):
        await run
    assert (it.length, queue.waiting) == (0, 0)


async def test_what_waits_too_long_or_is_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = WorkQueue()
    old, new = session("one:"), session("one:float16")
    queue.check_room(new, 1 << 20)  # one run may be as long as it likes
    refused = queue.add(old, 0, [1] * 9, sample=False)
    with pytest.raises(BusyError):
        queue.check_room(new, 1 << 14)
    queue.check_room(session("two:"), 1 << 14)
    monkeypatch.setattr(module, "_PATIENCE_S", 0.0)
    take = asyncio.create_task(queue.take())
    with pytest.raises(BusyError, match="no step was free"):
        await refused
    monkeypatch.undo()
    queue.add(new, 0, [1], sample=False)
    assert [work.cache for work in await take] == [new.cache]


async def test_what_queued_work_will_write_is_not_settled() -> None:
    queue = WorkQueue()
    it = session()
    it.cache.length = 90
    assert queue.settled(it) == 90
    it.length = 91
    queue.add(it, 80, [1], sample=False)
    assert queue.settled(it) == 80
    await queue.take()
    queue.add(it, 40, [1], sample=False)
    assert queue.settled(it) == 40
    assert queue.forget(it, "over")
    assert (queue.waiting, it.length) == (0, 40), "what runs will have written 80, and nothing 40"
    queue.finish([StageOutput(None, None)], 0.1)
    assert not queue.forget(it, "over")


async def test_blocks_that_are_still_to_be_copied_are_given_to_nobody() -> None:
    """A session goes back to token 20 of 320 that it shares, but that work is refused before any step.

    Its own copies of the blocks from there on are long out of the window of 16 when it goes on at 320. Were
    they given to another session, they would be copied to when that one has written there.
    """
    kv = Reservations()
    kv.resize(1000, 1)
    kv.windows = {0: 16}
    names = [bytes([block]) for block in range(20)]
    before = kv.open(0, 1, 320, "", [])
    kv.make_place(before, 0, 320, settled=0, most=400)
    kv.close(before, names, 320)
    reservation = kv.open(0, 1, 320, "", names)
    (cache,) = private_caches([16])
    queue, it = WorkQueue(), Session(cache, reservation, None, 320)
    cache.length = 320
    cache.copies += kv.make_place(reservation, 20, 21, settled=queue.settled(it), most=400)
    targets = {block for _, _, block in cache.copies}
    assert len(targets) == 19
    kv.make_place(reservation, 320, 330, settled=queue.settled(it), most=400)
    assert targets <= set(reservation.tables[16].tolist())


async def test_an_owners_next_chunk_is_in_time_for_its_turn() -> None:
    """Prompts come in chunks, each asked for when the one before is done, beside one that is here whole."""
    queue = WorkQueue()
    flood, it = session("flood"), session("one")
    run = queue.add(flood, 0, [1] * 4000, sample=False)

    async def prefill() -> None:
        for chunk in range(4):
            await queue.add(it, 256 * chunk, [1] * 256, sample=False)

    prefilling = asyncio.create_task(prefill())
    await asyncio.sleep(0)
    steps = []
    for _ in range(4):
        works = await queue.take()
        steps.append({work.cache: work.count for work in works})
        queue.finish(echo(works), 0.1)
    assert steps == [{flood.cache: 256, it.cache: 256}] * 4
    await prefilling
    run.cancel()


async def test_who_was_answered_is_in_the_next_step_though_others_wait() -> None:
    queue = WorkQueue()
    chat, prompt = session(), session()
    steps = []

    async def talk() -> None:
        for position in range(5):
            await queue.add(chat, position, [3], sample=True)

    talking = asyncio.create_task(talk())
    await asyncio.sleep(0)
    run = queue.add(prompt, 0, [1] * 2000, sample=False)
    while not talking.done():
        works = await queue.take()
        steps.append([work.cache for work in works])
        queue.finish(echo(works), 0.1)
        await asyncio.sleep(0)
    assert steps == [[chat.cache, prompt.cache]] * 5
    run.cancel()
