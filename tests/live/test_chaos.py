"""Under steady load peers are killed, come back, freeze, and lose their links: whatever happens, no token is
wrong, nobody waits long, and nothing stays behind.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.chaos import Chaos, Member, chaos
from support.client import chat
from support.reference import Reference

from p2pllm.errors import P2PLLMError
from p2pllm.serving import Figures, api_client

LAYERS = [range(13), range(13, 25), range(25, 30), range(19), range(19, 30)]
CLIENTS = 4
HANG_S = 10.0
SETTLED_S = 30.0
TOKENS = 40
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "top_k": 40}
PROMPTS = (
    "Tell the story of the number {number}, at length.",
    "Count from {number} to a hundred, in words.",
    "Story {number}. " + "They walked along the river, and then over a hill. " * 20 + "Go on with it.",
)


@dataclass(slots=True)
class Outcome:
    """What came of one request: when each piece came, from when it was asked for to when it was over."""

    entry: Member
    prompt: str
    options: dict[str, Any]
    times: list[float]
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    failure: str = ""


async def ask(entry: Member, rng: random.Random) -> Outcome:
    """One request, to whatever end."""
    clock = asyncio.get_running_loop().time
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": TOKENS}
    if rng.random() < 0.5:
        options |= SAMPLED | {"seed": rng.randrange(4)}
    prompt = rng.choice(PROMPTS).format(number=rng.randrange(8))
    outcome = Outcome(entry, prompt, options, [clock()])
    try:
        async with (
            asyncio.timeout(12 * HANG_S),
            api_client(entry.url) as client,
            aclosing(client.chat(chat(prompt), **options)) as pieces,
        ):
            async for piece in pieces:
                if isinstance(piece, Figures):
                    outcome.tokens = piece.token_ids
                else:
                    outcome.text += piece
                outcome.times.append(clock())
    except P2PLLMError as error:
        outcome.failure = str(error)
    outcome.times.append(clock())
    return outcome


async def client(made: Chaos, rng: random.Random, over: asyncio.Event) -> list[Outcome]:
    """Ask one peer that is well after the other."""
    outcomes: list[Outcome] = []
    while not over.is_set():
        well = [member for member in made.members if member.well]
        if well:
            outcomes.append(await ask(rng.choice(well), rng))
        await asyncio.sleep(0.05 if well and not outcomes[-1].failure else 0.5)
    return outcomes


def check(made: Chaos, outcomes: list[Outcome], reference: Reference) -> None:
    """No wrong token, no hang, and every failure is one that says why."""
    seen = set()
    for outcome in outcomes:
        began, ended = outcome.times[0], outcome.times[-1]
        excused = made.excuses(outcome.entry, began, ended)
        beside = [other for other in outcomes if other.entry is outcome.entry]
        for earlier, later in itertools.pairwise(outcome.times):
            patience = HANG_S + made.stopped_s(outcome.entry, earlier, later)
            if earlier == began:
                # It waits in the queue for those before it, and until somebody holds every layer again.
                before = sum(other.times[0] < began < other.times[-1] for other in beside)
                patience += HANG_S * before + made.missing_s(earlier, later)
            assert later - earlier <= patience, f"{outcome.failure or 'an answer'} after that long"
        if outcome.failure:
            assert excused, f"for no reason, after {ended - began:.1f} s: {outcome.failure}"
            assert "internal error" not in outcome.failure
        elif (what := (outcome.prompt, str(outcome.options), tuple(outcome.tokens))) not in seen:
            seen.add(what)
            assert outcome.text == reference.text(outcome.tokens)
            if outcome.options["temperature"]:
                reference.check_sampled(outcome.prompt, outcome.tokens, **outcome.options)
            else:
                reference.check_greedy(outcome.prompt, outcome.tokens, limit=TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "seed"), [(60, 1), (300, 2)], ids=["a minute", "minutes"])
async def test_whatever_happens(tmp_path: Path, reference: Reference, seconds: int, seed: int) -> None:
    async with chaos(tmp_path, LAYERS, seed) as made:
        idle, over = await made.free_blocks(), asyncio.Event()
        assert len(idle) == len(LAYERS)
        async with asyncio.TaskGroup() as tasks:
            clients = [
                tasks.create_task(client(made, random.Random(100 * seed + number), over))
                for number in range(CLIENTS)
            ]
            await made.run(seconds)
            over.set()
        outcomes = [outcome for task in clients for outcome in task.result()]
        complete = sum(not outcome.failure for outcome in outcomes)
        print(made.done, f"{complete} complete of {len(outcomes)}")
        for outcome in outcomes:
            print(made.told(outcome.entry, outcome.times), outcome.failure)
        assert complete > len(outcomes) // 2
        assert min(made.done[kind] for kind in ("kill", "freeze", "cut")) > 0
        check(made, outcomes, reference)
        await made.settled(idle, SETTLED_S)
        for process in (life for member in made.members for life in member.lives):
            said = process.log.read_text()
            for bug in ("session_crashed", "message_handler_failed", "request_crashed", "never retrieved"):
                assert bug not in said, f"{process.log.name}: {bug}"
