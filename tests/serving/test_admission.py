"""Requests at the gate of an entry, mostly through the real API, before a generator that others may fill."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from support.entries import Entry, LetterTokens, Steps, ask, until

from p2pllm.errors import BusyError, NoRouteError
from p2pllm.execution import SamplingParams
from p2pllm.serving.entry import Generation
from p2pllm.serving.front import fair_queue
from p2pllm.serving.front.admission import Admission, Outlook
from p2pllm.serving.front.completion import Completer, Finished, Prompt
from p2pllm.serving.front.concurrency import STRETCH, ConcurrencyLimit
from p2pllm.serving.front.fair_queue import MOST_OF_ONE, Ticket
from p2pllm.serving.front.gate import Gate
from p2pllm.serving.front.keys import ApiKeys, Client

GREEDY, LIGHT = "sk-greedy-0123456789", "sk-light-0123456789"
TOKENS = 40


def curve(count: int) -> float:
    """What a step takes for so many, as measured of small models on a CPU."""
    return 0.02 * (1 + 0.1 * (count - 1))


@pytest.fixture
def keys(tmp_path: Path) -> ApiKeys:
    path = tmp_path / "keys.toml"
    path.write_text(
        f'[[keys]]\nkey = "{GREEDY}"\nname = "greedy"\n[[keys]]\nkey = "{LIGHT}"\nname = "light"\n'
    )
    return ApiKeys(path)


async def answer(gate: Gate, steps: Steps, name: str, tokens: int = TOKENS) -> float:
    """Send one request past the gate alone: what sockets and threads take is not time of ``steps``. Returns
    how long it took.
    """
    began, request = steps.now, Generation((1,), SamplingParams(), tokens)
    with gate.place(Client(name), 1, tokens) as place:
        async for _ in place.through(lambda: steps.generate(request)):
            pass
    return steps.now - began


async def turns_until(condition: Callable[[], bool]) -> None:
    """As ``until``, in turns of the loop."""
    while not condition():
        await asyncio.sleep(0)


@pytest.mark.parametrize("moment", range(0, 501, 50))
@pytest.mark.parametrize("length", [TOKENS, 10 * TOKENS])
async def test_one_request_beside_fifty_takes_less_than_twice_as_long(length: int, moment: int) -> None:
    """Whenever it comes: the others have had ``moment`` tokens by then, so the limit is on its way up, or
    down.
    """
    steps = Steps(curve)
    gate = Gate(lambda _: Outlook(), clock=steps.clock)
    alone = await answer(gate, steps, "light")
    crowd = [asyncio.ensure_future(answer(gate, steps, "greedy", length)) for _ in range(50)]
    await turns_until(lambda: gate.admission.waiting > 20 and steps.tokens >= TOKENS + moment)
    assert await answer(gate, steps, "light") <= 2 * alone
    assert gate.admission.waiting > 20, "it was the last to come"
    for other in crowd:
        other.cancel()
    await asyncio.wait(crowd)
    assert gate.admission.waiting + gate.admission.running == 0


async def test_overload_leaves_the_goodput_where_it_was() -> None:
    """80 clients at once where 8 may run, each of whom asks again and again."""
    best = max(count for count in range(1, 99) if curve(count) <= STRETCH * curve(1))
    steps = Steps(curve)
    gate = Gate(lambda _: Outlook(), clock=steps.clock)

    async def insist(name: str) -> None:
        while steps.now < 40:
            await answer(gate, steps, name)

    asking = [asyncio.ensure_future(insist(str(number))) for number in range(10 * best)]
    await turns_until(lambda: steps.now > 12)
    tokens, began = steps.tokens, steps.now
    await turns_until(lambda: steps.now > 40)
    goodput = (steps.tokens - tokens) / (steps.now - began)
    await asyncio.gather(*asking)
    assert goodput >= 0.9 * best / curve(best)


async def test_a_full_queue_says_when_to_come_again(keys: ApiKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ConcurrencyLimit, "value", 2)
    steps = Steps(curve, real_s=0.05)
    entry = Entry(steps, keys=keys)
    async with entry.listening() as client:
        crowd = [asyncio.ensure_future(ask(client, GREEDY, max_tokens=3000)) for _ in range(MOST_OF_ONE + 2)]
        await until(lambda: entry.waiting == MOST_OF_ONE)
        waits = []
        for _ in range(3):
            status, body, headers = await ask(client, GREEDY)
            assert status == 429
            assert body["error"]["type"] == "rate_limit_error"
            waits.append(int(headers["Retry-After"]))
        assert waits == sorted(waits), "each is promised the place after the one before"
        assert (await ask(client, LIGHT, max_tokens=1))[0] == 200
        figures = (await (await client.get("/api/swarm")).json())["admission"]
        assert (figures["waiting"], figures["refused"]) == (MOST_OF_ONE, {"queue_full": 3})
        text = await (await client.get("/metrics")).text()
        assert f"p2pllm_requests_waiting {MOST_OF_ONE}.0" in text.splitlines()
        assert "p2pllm_prompt_tokens_cached_total 0.0" in text.splitlines()
        assert 'p2pllm_requests_refused_total{reason="queue_full"} 3.0' in text.splitlines()
        for request in crowd:
            request.cancel()
        await asyncio.wait(crowd)
        await until(lambda: entry.waiting + entry.running + steps.running == 0)


def test_retry_after_is_the_measured_time_until_there_is_a_place() -> None:
    """Requests take 8 s, 4 run at once: one ends every 2 s, and every second end is for each of two."""
    admission = Admission()
    tickets = [Ticket(Client(name), 1.0, 0.0) for name in ("a", "b") * 4]
    for ticket in tickets:
        admission.enter(ticket, 0.0)
    for _ in range(16):
        started = admission.next(0.0, lambda _: Outlook())
        if started is not None:
            admission.end(started, 1.0, 8.0, 0.0)
            admission.enter(started, 0.0)
    admission.limit._limit = 4.0
    while admission.next(0.0, lambda _: Outlook()):
        pass
    assert admission.running == 4
    assert admission.each_s() == pytest.approx(2.0)
    errors = [admission.give_up(ticket, 10.0) for ticket in tickets[-2:] + tickets[-2:]]
    assert [error.retry_after_s for error in errors if isinstance(error, BusyError)] == pytest.approx(
        [4.0, 4.0, 8.0, 8.0]
    )


def test_what_is_put_back_is_tried_again_as_soon_as_something_ends() -> None:
    admission = Admission()
    admission.limit._limit = 2.0
    first, second = (Ticket(Client(name), 1.0, 0.0) for name in "ab")
    for ticket in (first, second):
        admission.enter(ticket, 0.0)
        assert admission.next(0.0, lambda _: Outlook()) is ticket
    admission.put_back(second, BusyError("no KV cache"), 1.0)
    assert admission.next(1.01, lambda _: Outlook()) is None
    admission.end(first, 1.0, 1.0, 1.02)
    assert admission.next(1.02, lambda _: Outlook()) is second


def test_what_is_put_back_again_and_again_waits_twice_as_long_each_time() -> None:
    admission, ticket, now = Admission(), Ticket(Client("a"), 1.0, 0.0), 0.0
    admission.enter(ticket, now)
    for pause in (0.1, 0.2, 0.4, 0.8, 0.8):
        assert admission.next(now, lambda _: Outlook()) is ticket
        admission.put_back(ticket, BusyError("no KV cache"), now)
        assert admission.next(now + 0.99 * pause, lambda _: Outlook()) is None
        now += 1.01 * pause


def test_a_limit_that_has_come_down_leaves_the_room_for_newcomers() -> None:
    admission = Admission()
    greedy = [Ticket(Client("greedy"), 1.0, 0.0) for _ in range(10)]
    ann, ben = (Ticket(Client(name), 1.0, 1.0) for name in ("ann", "ben"))

    def start() -> Ticket | None:
        return admission.next(2.0, lambda _: Outlook())

    for ticket in greedy:
        admission.enter(ticket, 0.0)
    admission.limit._limit = 8.0
    assert [start() for _ in range(9)] == [*greedy[:8], None]
    admission.limit._limit = 6.0
    for ticket in (ann, ben):
        admission.enter(ticket, 1.0)
    assert [start(), start()] == [ann, None], "a quarter of six is one"
    admission.end(ann, 1.0, 1.0, 2.0)
    assert [start(), start()] == [ben, None]
    for ticket in greedy[:2]:
        admission.end(ticket, 1.0, 1.0, 2.0)
    admission.enter(ann, 2.0)
    assert start() is None, "six of greedy run, and ben"
    admission.end(greedy[2], 1.0, 1.0, 2.0)
    assert [start(), start()] == [ann, None], "ben has the place"


async def test_who_has_to_give_way_is_told_at_once(keys: ApiKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "MOST_WAITING", 3)
    monkeypatch.setattr(ConcurrencyLimit, "value", 2)
    entry = Entry(Steps(curve, real_s=0.01), keys=keys)
    async with entry.listening() as client:
        crowd = [asyncio.ensure_future(ask(client, GREEDY, max_tokens=60)) for _ in range(5)]
        await until(lambda: entry.waiting == 3)
        light = asyncio.ensure_future(ask(client, LIGHT, max_tokens=1))
        (refused,), _ = await asyncio.wait(crowd, return_when=asyncio.FIRST_COMPLETED)
        assert refused.result()[0] == 429
        assert (await light)[0] == 200
        assert [(await other)[0] for other in crowd].count(200) == 4


async def test_a_request_costs_what_its_prompt_really_has() -> None:
    gate, completer = Gate(lambda _: Outlook()), Completer(LetterTokens(), Steps(curve))  # type: ignore[arg-type]
    prompt = Prompt([{"role": "user", "content": "hello"}], SamplingParams(), max_tokens=3)
    with gate.place(Client("ann"), 1000, 3) as place:
        events = [event async for event in completer.complete(prompt, place)]
        assert (place.prompt, place.tokens) == (5, 3)
    assert isinstance(events[-1], Finished)
    assert events[-1].prompt_tokens == 5


async def test_a_request_waits_for_layers_that_nobody_serves() -> None:
    steps = Steps(curve)
    entry = Entry(steps, queue_timeout_s=5.0)
    entry.outlook = Outlook(missing=((3, 5),))
    async with entry.listening() as client:
        asking = asyncio.ensure_future(ask(client, max_tokens=3))
        await until(lambda: entry.waiting == 1)
        await asyncio.sleep(0.1)
        assert steps.calls == 0
        entry.outlook = Outlook()
        assert (await asking)[0] == 200


async def test_when_nobody_comes_the_error_names_the_layers() -> None:
    entry = Entry(Steps(curve), queue_timeout_s=0.3)
    entry.outlook = Outlook(missing=((3, 5), (9, 10)))
    async with entry.listening() as client:
        status, body, _ = await ask(client)
        assert status == 503
        assert body["error"]["code"] == "no_route"
        assert "3:5, 9:10" in body["error"]["message"]


@pytest.mark.parametrize("outlook", [Outlook(has_room=False), Outlook(work_s=0.1, wait_s=1.0)])
async def test_it_holds_back_while_the_view_has_no_room(outlook: Outlook) -> None:
    """A crowded chain takes one request, so that there is something to measure; a full one takes none."""
    steps = Steps(curve, real_s=0.01)
    entry = Entry(steps, queue_timeout_s=0.5)
    entry.outlook = outlook
    async with entry.listening() as client:
        statuses = await asyncio.gather(*(ask(client, max_tokens=100) for _ in range(3)))
    assert sorted(status for status, _, _ in statuses) == ([200, 429, 429] if outlook.has_room else [429] * 3)
    assert steps.most == int(outlook.has_room)


@pytest.mark.parametrize("error", [BusyError("no KV cache"), NoRouteError(((1, 2),))])
async def test_a_request_that_finds_no_chain_goes_back_to_the_head(error: Exception) -> None:
    steps = Steps(curve)
    steps.failing = dict.fromkeys((1, 2), error)
    entry = Entry(steps)
    async with entry.listening() as client:
        answers = await asyncio.gather(*(ask(client, max_tokens=3) for _ in range(4)))
    assert [status for status, _, _ in answers] == [200] * 4
    assert steps.calls == 6


async def test_busy_until_the_deadline_is_429() -> None:
    steps = Steps(curve)
    steps.failing = dict.fromkeys(range(1, 100), BusyError("no KV cache"))
    entry = Entry(steps, queue_timeout_s=0.4)
    async with entry.listening() as client:
        status, body, headers = await ask(client)
    assert status == 429
    assert int(headers["Retry-After"]) >= 1
    assert "no room" in body["error"]["message"]
