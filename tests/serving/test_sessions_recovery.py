"""Sessions that go on when stages of their chains are lost, freeze, crawl or leave, at whatever moment."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import aclosing

import pytest
from support.wires import GREEDY, A, B, C, D, Wires, chain, expected, settled

from p2pllm.errors import NoRouteError
from p2pllm.scheduling import PeerId
from p2pllm.serving.entry import trouble
from p2pllm.serving.entry.generation import Generation, Generator
from p2pllm.transport import (
    Failed,
    Hidden,
    Message,
    Open,
    Replay,
    Reroute,
    Resume,
    Token,
    Tokens,
    Where,
)

A2, B2, C2 = ("1" * 40, "2" * 40, "3" * 40)
SPANS = {A: (0, 2), A2: (0, 2), B: (2, 4), B2: (2, 4), C: (4, 6), C2: (4, 6)}
PROMPT = [*range(1, 31)]
COUNT = 12


def swarm() -> tuple[Wires, Generator]:
    """Every layer twice held, and an entry without layers; A, B and C are the best."""
    network = Wires({**SPANS, D: (0, 1)})
    chains = [
        chain((first, 0, 2), (middle, 2, 4), (last, 4, 6))
        for first, middle, last in itertools.product((A, A2), (B, B2), (C, C2))
    ]
    return network, network.entry(D, *chains)


async def tokens_with(
    network: Wires, generator: Generator, at: int, happens: Callable[[], None], count: int = COUNT
) -> list[int]:
    """All tokens of a request, where something happens once so many have come."""
    tokens: list[int] = []
    async with asyncio.timeout(20), aclosing(generator.generate(request(count))) as stream:
        if at == 0:
            happens()
        async for event in stream:
            tokens.append(event.token)
            if len(tokens) == at:
                happens()
    await settled(network)
    return tokens


def request(count: int = COUNT) -> Generation:
    return Generation(tuple(PROMPT), GREEDY, count)


@pytest.mark.parametrize("lost", [A, B, C], ids=["first", "middle", "last"])
@pytest.mark.parametrize("at", range(1, COUNT))
async def test_a_lost_stage_is_replaced_and_the_others_go_on(lost: PeerId, at: int) -> None:
    network, generator = swarm()
    async with network.running():
        assert await tokens_with(network, generator, at, lambda: network.kill(lost)) == expected(
            PROMPT, COUNT
        )
    assert generator.reroutes == 1
    assert network.blamed == {lost}
    # The entry may have had a token or two more when it heard of it.
    (resume,) = {it.resume for _, _, it in network.sent if isinstance(it, Reroute)}
    assert len(PROMPT) + at - 1 <= resume <= len(PROMPT) + COUNT - 2
    assert generator.recomputed_layer_tokens == 2 * resume
    for peer in {A, B, C} - {lost}:
        # All but the last token once; the one at which it goes on, and what was on its way, once more.
        assert 0 <= network.executors[peer].computed - (len(PROMPT) + COUNT - 1) <= 2
    replayed = [it for _, _, it in network.sent if isinstance(it, Hidden) and it.generation > 0]
    assert sum(it.shape[0] for it in replayed if it.position < resume) == (0 if lost == A else resume)
    fed = [it.position for _, _, it in network.sent if isinstance(it, Tokens) and it.generation > 0]
    assert fed == [0 if lost == A else resume]


@pytest.mark.parametrize("lost", [(A, B), (B, C), (A, C), (A, B, C)], ids=len)
async def test_several_are_lost_at_once(lost: tuple[PeerId, ...]) -> None:
    network, generator = swarm()

    def happens() -> None:
        for peer in lost:
            network.kill(peer)

    async with network.running():
        assert await tokens_with(network, generator, 5, happens) == expected(PROMPT, COUNT)


@pytest.mark.parametrize("lost", [A, B, C], ids=["first", "middle", "last"])
@pytest.mark.parametrize("frames", [0, 1, 3, 5])
async def test_a_stage_is_lost_during_the_prompt(
    lost: PeerId, frames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pllm.serving.entry.opening.CHUNK", 8)
    network, generator = swarm()
    seen = 0

    def count(_sender: PeerId, message: Message) -> Message:
        nonlocal seen
        if isinstance(message, Hidden):
            seen += 1
            if seen == frames + 1:
                network.kill(lost)
        return message

    network.tamper = count
    async with network.running():
        assert await tokens_with(network, generator, 99, lambda: None) == expected(PROMPT, COUNT)
    assert generator.reroutes == 1


@pytest.mark.parametrize("second", [A, B2, C], ids=["before it", "the new one", "behind it"])
@pytest.mark.parametrize("moment", [Open, Reroute, Resume, Hidden, Tokens])
async def test_another_is_lost_during_recovery(
    second: PeerId, moment: type[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(trouble._AVOIDED_S, "lost", 0.05)
    network, generator = swarm()
    is_lost = False

    def watch(_sender: PeerId, message: Message) -> Message:
        nonlocal is_lost
        if not is_lost and isinstance(message, moment) and message.generation > 0:  # type: ignore[attr-defined]
            is_lost = True
            network.kill(second)
            if second == B2:
                network.revive(B)  # or nobody is left
        return message

    network.tamper = watch
    async with network.running():
        tokens = await tokens_with(network, generator, 4, lambda: network.kill(B))
    assert tokens == expected(PROMPT, COUNT)
    assert is_lost
    assert generator.reroutes in (1, 2)


@pytest.mark.parametrize("frozen", [A, B, C], ids=["first", "middle", "last"])
async def test_a_frozen_stage_is_found_by_asking(frozen: PeerId) -> None:
    network, generator = swarm()
    async with network.running():
        tokens = await tokens_with_frozen(network, generator, frozen)
        assert tokens == expected(PROMPT, COUNT)
        assert network.blamed == {frozen}
        assert not network.idle(), "it does not know yet"
        network.thaw(frozen)
        await settled(network)


async def tokens_with_frozen(network: Wires, generator: Generator, frozen: PeerId) -> list[int]:
    tokens: list[int] = []
    async with asyncio.timeout(10), aclosing(generator.generate(request())) as stream:
        async for event in stream:
            tokens.append(event.token)
            if len(tokens) == 5:
                network.frozen.add(frozen)
    return tokens


async def test_a_straggler_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pllm.serving.entry.suspicion._SLOW_S", 0.3)
    monkeypatch.setattr("p2pllm.serving.entry.suspicion._CHECK_S", 0.1)
    network, generator = swarm()
    quick = network.executors[B].run

    async def slow(*arguments: object, **more: object) -> object:
        await asyncio.sleep(0.05)
        return await quick(*arguments, **more)  # type: ignore[arg-type]

    def happens() -> None:
        network.executors[B].run = slow  # type: ignore[method-assign,assignment]

    async with network.running():
        assert await tokens_with(network, generator, 5, happens, 60) == expected(PROMPT, 60)
    assert network.blamed == {B}
    assert generator.reroutes == 1


@pytest.mark.parametrize("drops", [range(6), range(1, 2), range(2, 5), None], ids=str)
@pytest.mark.parametrize("leaving", [A, B, C], ids=["first", "middle", "last"])
async def test_who_leaves_or_drops_layers_hands_its_sessions_over(
    leaving: PeerId, drops: range | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pllm.serving.entry.filling.POLL_S", 0.0)
    network, generator = swarm()
    count = 100

    def happens() -> None:
        if drops is None:
            network.stages[leaving].accepting = False
            return
        for _ in range(2):  # it says so once
            network.stages[leaving].hand_over(drops, "it is about to drop them")

    async with network.running():
        assert await tokens_with(network, generator, 5, happens, count) == expected(PROMPT, count)
    told = [message for _, _, message in network.sent if isinstance(message, Failed)]
    assert network.blamed == set()
    if drops is not None and not {*drops} & {*range(*SPANS[leaving])}:
        assert (generator.reroutes, told) == (0, [])
        return
    assert [message.cause for message in told] == ["leaving"]
    assert generator.reroutes == 1
    (resume,) = {it.resume for _, _, it in network.sent if isinstance(it, Reroute)}
    assert len(PROMPT) + 5 <= resume < len(PROMPT) + count, "tokens have come meanwhile"
    assert generator.recomputed_layer_tokens == 2 * resume
    # The one that took over had nearly everything when it did.
    again = [it for _, _, it in network.sent if isinstance(it, Hidden | Tokens) and it.generation > 1]
    rows = [len(it.tokens) if isinstance(it, Tokens) else it.shape[0] for it in again if it.position < resume]
    assert sum(rows) < resume - len(PROMPT)
    for peer in {A, B, C} - {leaving}:
        assert network.executors[peer].computed <= len(PROMPT) + count + 2


@pytest.mark.parametrize(
    "lost", [A, A2, B, B2, C], ids=["before it", "a spare", "itself", "the new one", "behind it"]
)
@pytest.mark.parametrize("moment", [Open, Resume, Replay, Where, Reroute])
async def test_a_loss_while_sessions_are_handed_over(
    lost: PeerId, moment: type[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pllm.serving.entry.filling.POLL_S", 0.0)
    monkeypatch.setattr("p2pllm.serving.entry.course.HAND_OVER_S", 0.05)
    network, generator = swarm()
    is_lost = False

    def watch(_sender: PeerId, message: Message) -> Message:
        nonlocal is_lost
        is_right = isinstance(message, moment) and (moment is Replay or message.generation > 0)  # type: ignore[attr-defined]
        if is_right and not is_lost:
            is_lost = True
            network.kill(lost)
        return message

    def happens() -> None:
        network.stages[B].accepting = False

    network.tamper = watch
    async with network.running():
        assert await tokens_with(network, generator, 5, happens, 60) == expected(PROMPT, 60)
    assert is_lost


async def test_who_leaves_and_has_no_successor_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pllm.serving.entry.course.HAND_OVER_S", 0.01)
    network = Wires({A: (0, 3), B: (3, 6), C: (3, 6), D: (0, 1)})
    generator = network.entry(D, chain((A, 0, 3), (B, 3, 6)))

    def happens() -> None:
        network.stages[B].accepting = False

    async with network.running():
        assert await tokens_with(network, generator, 5, happens, 60) == expected(PROMPT, 60)
    assert generator.reroutes == 0


async def test_without_a_way_on_what_came_stays_and_the_error_names_the_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("p2pllm.serving.entry.course.HEAL_S", 0.2)
    network = Wires({A: (0, 3), B: (3, 6), D: (0, 1)})
    generator = network.entry(D, chain((A, 0, 3), (B, 3, 6)))
    tokens: list[int] = []

    async def consume() -> None:
        async for event in generator.generate(request()):
            tokens.append(event.token)
            if len(tokens) == 5:
                network.kill(B)

    async with network.running():
        with pytest.raises(NoRouteError, match="it does not answer") as caught:
            await consume()
        assert caught.value.missing == ((0, 6),)
        assert tokens == expected(PROMPT, len(tokens))
        await settled(network)


async def test_a_holder_that_comes_back_in_time_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trouble._AVOIDED_S, "lost", 0.05)
    network = Wires({A: (0, 3), B: (3, 6), D: (0, 1)})
    generator = network.entry(D, chain((A, 0, 3), (B, 3, 6)))

    def happens() -> None:
        network.kill(B)
        asyncio.get_running_loop().call_later(0.1, network.revive, B)

    async with network.running():
        assert await tokens_with(network, generator, 5, happens) == expected(PROMPT, COUNT)
    assert network.executors[A].computed <= len(PROMPT) + COUNT + 1, "it has kept everything"


async def test_without_a_first_chain_nobody_waits_outside_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pllm.serving.entry.course._FIRST_PAUSE_S", 99.0)
    network = Wires({A: (0, 6), D: (0, 1)})
    async with network.running(), asyncio.timeout(5):
        with pytest.raises(NoRouteError):
            await anext(network.entry(D).generate(request()))
    assert network.sent == []


async def test_a_stage_without_room_for_more_is_left_and_not_blamed() -> None:
    network, generator = swarm()
    async with network.running():

        def happens() -> None:
            network.executors[B].runs_out = True

        assert await tokens_with(network, generator, 5, happens) == expected(PROMPT, COUNT)
    assert network.blamed == set()


@pytest.mark.parametrize("moment", [Open, Tokens, Hidden, Token, Reroute, Resume])
async def test_closing_the_stream_frees_everything_at_any_moment(moment: type[Message]) -> None:
    network, generator = swarm()
    reached = asyncio.Event()
    is_rerouted = moment in (Reroute, Resume)

    def watch(_sender: PeerId, message: Message) -> Message:
        is_right = isinstance(message, moment)
        if is_right and (not is_rerouted or message.generation > 0):  # type: ignore[attr-defined]
            reached.set()
        return message

    async def consume() -> None:
        async with aclosing(generator.generate(request())) as stream:
            async for _ in stream:
                if is_rerouted:
                    network.kill(B)

    network.tamper = watch
    async with network.running(), asyncio.timeout(5):
        task = asyncio.create_task(consume())
        await reached.wait()
        task.cancel()
        await asyncio.wait([task])
        await asyncio.sleep(0.05)
        assert network.idle()
        assert all(stages.sessions == 0 for stages in network.stages.values())


async def test_only_survivors_are_told_of_a_reroute_and_others_are_opened() -> None:
    network, generator = swarm()
    async with network.running():
        await tokens_with(network, generator, 5, lambda: network.kill(B))
    told = {target for _, target, it in network.sent if isinstance(it, Reroute)}
    opened = {target for _, target, it in network.sent if isinstance(it, Open) and it.generation > 0}
    assert (told, opened) == ({A, C}, {B2})
    assert not any(isinstance(it, Failed) and it.cause == "broken" for _, _, it in network.sent)
