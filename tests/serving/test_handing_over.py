"""Who is to leave a chain says so until it is heard, and to chains that can do something about it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import pytest
from support.wires import GREEDY, A, B, D, Wires, chain, expected, settled

from p2pllm.errors import LinkError
from p2pllm.scheduling import Chain, PeerId
from p2pllm.serving.entry.generation import Generation, Generator
from p2pllm.serving.entry.trouble import StageLostError
from p2pllm.transport import Failed, Message, Open, Opened, Reroute

A2, B2 = ("1" * 40, "2" * 40)
SPANS = {A: (0, 3), A2: (0, 3), B: (3, 6), B2: (3, 6), D: (0, 1)}
COUNT = 100
ALL = range(6)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pllm.serving.entry.filling.POLL_S", 0.0)
    monkeypatch.setattr("p2pllm.serving.entry.course.HAND_OVER_S", 0.001)
    monkeypatch.setattr("p2pllm.serving.stage.stages.SWEEP_S", 0.001)


def swarm(*firsts: PeerId) -> tuple[Wires, Generator]:
    network = Wires(SPANS)
    chains = [chain((first, 0, 3), (last, 3, 6)) for last in (B, B2) for first in firsts]
    return network, network.entry(D, *chains)


async def tokens_of(generator: Generator) -> AsyncIterator[int]:
    """Counts the tokens of a request, and sees that they are right in the end."""
    tokens: list[int] = []
    async with asyncio.timeout(10), aclosing(generator.generate(Generation((5,), GREEDY, COUNT))) as stream:
        async for event in stream:
            tokens.append(event.token)
            yield len(tokens)
    assert tokens == expected([5], COUNT)


def of(network: Wires, kind: type[Message]) -> list[Any]:
    return [message for _, _, message in network.sent if isinstance(message, kind)]


async def test_a_chain_is_not_told_while_it_is_opened() -> None:
    """Each time that its last answer is on its way."""
    network, generator = swarm(A)

    def watch(sender: PeerId, message: Message) -> Message:
        if isinstance(message, Opened) and sender == B2:
            network.stages[A].hand_over(ALL, "it is about to drop them")
        return message

    network.tamper = watch
    async with network.running():
        async for count in tokens_of(generator):
            if count == 5:
                network.kill(B)
            if count == 50:
                assert not [it for it in of(network, Failed) if it.cause == "leaving"]
                network.stages[A].hand_over(ALL, "it is about to drop them")
        await settled(network)
    (reroute,) = of(network, Reroute)
    assert [it.generation for it in of(network, Failed) if it.cause == "leaving"] == [reroute.generation]


@pytest.mark.parametrize("is_drained", [True, False], ids=["drained", "leaving"])
async def test_the_next_chain_is_told_as_well(is_drained: bool) -> None:
    """First there is nobody to take over, then another stage is lost, then somebody comes."""
    network, generator = swarm(A, A2)
    absent = {A2}
    find: Callable[..., Chain] = generator._router.chain

    def chain_of(*, excluded: frozenset[PeerId], **more: Any) -> Chain:
        return find(excluded=excluded | absent, **more)

    generator._router.chain = chain_of  # type: ignore[method-assign]
    async with network.running():
        async for count in tokens_of(generator):
            if count >= 5 and is_drained:
                network.stages[A].hand_over(ALL, "it is about to drop them")
            elif count == 5:
                network.stages[A].accepting = False
            if count == 10:
                network.kill(B)
            if count == 30:
                absent.clear()
        await settled(network)
    told = [it.generation for it in of(network, Failed) if it.cause == "leaving"]
    assert len(told) == len({*told}) == 2
    assert A2 in {target for _, target, it in network.sent if isinstance(it, Open)}
    assert network.blamed <= {B}


async def test_what_could_not_be_said_is_said_again() -> None:
    network, generator = swarm(A, A2)
    send = network.stages[A]._send
    refused: list[Message] = []

    def send_less(target: PeerId, message: Message) -> None:
        if isinstance(message, Failed) and not refused:
            refused.append(message)
            raise LinkError("the link is congested")
        send(target, message)

    network.stages[A]._send = send_less
    async with network.running():
        async for count in tokens_of(generator):
            if count in (5, 6, 7):
                network.stages[A].hand_over(ALL, "it is about to drop them")
        await settled(network)
    assert of(network, Failed) == refused
    assert generator.reroutes == 1


async def test_a_loss_ends_what_was_made_ready_for_another_chain() -> None:
    network, generator = swarm(A, A2)

    def watch(_sender: PeerId, message: Message) -> Message:
        if isinstance(message, Open) and message.generation == 1:
            (session,) = generator._sessions.values()
            session.lose(StageLostError({B}, "it is silent"))
        return message

    network.tamper = watch
    async with network.running():
        async for count in tokens_of(generator):
            if count == 5:
                network.stages[A].hand_over(ALL, "it is about to drop them")
        await settled(network)
    opened = {it.generation for it in (*of(network, Open), *of(network, Reroute))}
    assert opened == {0, 1, 2}, "nothing is left that would end the chain that replaces it"
