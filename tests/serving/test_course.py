"""How long a request looks for a way on."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from support.wires import GREEDY, A, B, D, Wires, chain, expected, settled

from p2pllm.serving.entry import trouble
from p2pllm.serving.entry.course import Course
from p2pllm.serving.entry.generation import Generation
from p2pllm.serving.entry.trouble import StageLostError


@pytest.mark.parametrize("cause", ["slow", "leaving"])
async def test_what_was_put_off_long_ago_leaves_a_loss_all_its_time(
    cause: trouble.Cause, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(trouble._AVOIDED_S, "lost", 0.05)
    network = Wires({A: (0, 3), B: (3, 6), D: (0, 1)})
    generator = network.entry(D, chain((A, 0, 3), (B, 3, 6)))
    passed = 0.0
    monkeypatch.setattr(Course, "_now", lambda _: asyncio.get_running_loop().time() + passed)
    tokens: list[int] = []
    stream = generator.generate(Generation((5,), GREEDY, 12))
    async with network.running(), aclosing(stream):
        async for event in stream:
            tokens.append(event.token)
            if len(tokens) == 3:
                (session,) = generator._sessions.values()
                session.lose(StageLostError({B}, "there is nobody better", cause=cause))
            elif len(tokens) == 6:
                assert network.blamed == set()
                passed = 60.0
            elif len(tokens) == 8:
                network.kill(B)
                asyncio.get_running_loop().call_later(0.1, network.revive, B)
        await settled(network)
    assert tokens == expected([5], 12)
    assert generator.reroutes == 1
