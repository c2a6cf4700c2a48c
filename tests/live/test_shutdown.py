"""How a peer ends: what it has begun it finishes within its grace, and the second signal means now."""

from __future__ import annotations

import asyncio
import signal
from contextlib import aclosing
from pathlib import Path

import pytest
from support.client import chat, until_ready
from support.processes import Process, api_of, swarm
from support.reference import Reference

from p2pllm.errors import P2PLLMError
from p2pllm.serving import Figures, api_client

QUESTION = "Tell a long story about the sea."
BEGUN = 3
"""Pieces of the answer that come before the signal."""

ENDS_S = 15.0


async def answer_while(peer: Process, tokens: int, *signals: signal.Signals) -> Figures:
    """A greedy answer of a peer that is sent signals when it has begun."""
    pieces: list[str | Figures] = []
    options = {"temperature": 0, "max_tokens": tokens}
    async with (
        api_client(api_of(peer)) as client,
        aclosing(client.chat(chat(QUESTION), **options)) as answering,
    ):
        async for piece in answering:
            pieces.append(piece)
            if len(pieces) == BEGUN:
                for number in signals:
                    peer.popen.send_signal(number)
                    await asyncio.sleep(0.2)
    assert isinstance(pieces[-1], Figures)
    return pieces[-1]


async def test_signals(tmp_path: Path, reference: Reference) -> None:
    """One peer may finish, one has no time to, and one is told twice."""
    with swarm(tmp_path) as made:
        all_layers = ("--layers", "0:30")
        graces = ("60", "0.5", "60")
        peers = [made.join(*all_layers, "--grace", grace) for grace in graces]
        patient, hasty, told_twice = peers
        await until_ready(*map(api_of, peers))

        answering = asyncio.create_task(answer_while(patient, 60, signal.SIGTERM))
        await asyncio.to_thread(patient.event, "peer_leaving")
        async with api_client(api_of(patient)) as client:
            assert not await client.ready()
            with pytest.raises(P2PLLMError, match="this peer is leaving the swarm: ask another one"):
                await anext(client.chat(chat(QUESTION)))
        figures = await answering
        reference.check_greedy(QUESTION, figures.token_ids, limit=60)
        assert await asyncio.to_thread(patient.popen.wait, ENDS_S) == 0

        with pytest.raises(P2PLLMError):
            await answer_while(hasty, 2000, signal.SIGTERM)
        assert await asyncio.to_thread(hasty.popen.wait, ENDS_S) == 0

        with pytest.raises(P2PLLMError):
            await answer_while(told_twice, 2000, signal.SIGTERM, signal.SIGTERM)
        assert await asyncio.to_thread(told_twice.popen.wait, ENDS_S) == -signal.SIGTERM
