"""What a client sees when a peer is lost in the middle of an answer: the pause, the tokens, and what comes
next.

Six real peers hold every layer twice. Run by run one stage of the chain of an answer is killed, or frozen, at
a random token; the answer is compared with that of the same request without a loss, through another entry,
which shares no prefix cache with the first.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final

from p2pllm.bench.recovery_judge import Judge, parting
from p2pllm.bench.recovery_loss import ROLES, Loss
from p2pllm.bench.recovery_runs import Run, longest_wait
from p2pllm.bench.recovery_swarm import HeldTwice, Host, held_twice, slices
from p2pllm.errors import P2PLLMError
from p2pllm.execution import ChatTokenizer, SamplingParams, open_checkpoint
from p2pllm.serving import Figures, api_client

__all__ = ["Recovery", "measure_recovery"]

FROZEN: Final = 3
"""One run in so many freezes the peer, the others kill it."""

STORY: Final = (
    "Story {number}. Three people own a computer each, and none of the three is large enough for what they "
    "want to do. So they share the work: the first one begins, the second goes on, and the third ends it. "
    "One evening the second computer breaks. Tell the story of that evening, as long and as full of detail "
    "as you can, and of what the three people do then."
)
TEMPERATURE: Final = 0.7
NEXT_TOKENS: Final = 4
EARLIEST: Final = 2
LATEST: Final = 6
"""So many tokens from the end; from then on all might be on their way already."""

ATTEMPTS: Final = 12
"""Answers begun for one run until the stage that is to be lost is not on the entry itself."""

ANSWER_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """How much to measure: ``runs`` with answers of so many ``tokens``; ``seed`` is of all that is drawn."""

    model: str
    runs: int
    tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class _Request:
    """One that nobody has made before."""

    messages: list[dict[str, str]]
    sampling: SamplingParams

    def options(self, tokens: int) -> dict[str, Any]:
        return {
            "temperature": self.sampling.temperature,
            "seed": self.sampling.seed,
            "max_tokens": tokens,
        }


@dataclass(slots=True)
class _Answer:
    """When it was asked for and its pieces came (s of the loop's clock), its tokens, and what went wrong."""

    asked: float
    arrivals: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    failure: str = ""

    @property
    def ttft_s(self) -> float | None:
        return self.arrivals[0] - self.asked if self.arrivals else None


async def measure_recovery(bench: Recovery) -> AsyncIterator[Run]:
    """Yield run after run.

    Raises ModelError, and P2PLLMError if the swarm does not come up, or is not whole again after a loss.
    """
    checkpoint = open_checkpoint(bench.model)
    head = checkpoint.head_bytes("float32") / checkpoint.layer_bytes("float32")
    tokenizer = ChatTokenizer(checkpoint)
    async with held_twice(bench.model, slices(checkpoint.layers, head)) as swarm:
        runner = _Runner(bench, swarm, tokenizer, Judge(checkpoint))
        for number in range(bench.runs):
            yield await runner.run(number)


class _Runner:
    def __init__(self, bench: Recovery, swarm: HeldTwice, tokenizer: ChatTokenizer, judge: Judge) -> None:
        self._bench = bench
        self._swarm = swarm
        self._tokenizer = tokenizer
        self._judge = judge
        self._rng = random.Random(bench.seed)
        self._stories = itertools.count(1)
        self._entries = itertools.cycle(swarm.hosts)

    async def run(self, number: int) -> Run:
        """Lose a stage, ask the next question, bring the peer back, and ask the first one again."""
        role, turn = ROLES[number % len(ROLES)], number // len(ROLES)
        frozen = turn % FROZEN == FROZEN - 1
        for entry, request, loss in self._attempts(role, frozen=frozen, greedy=turn % 2 == 0):
            entry.rerouted.clear()
            answer = await self._ask(entry, request, self._bench.tokens, loss.hear)
            if loss.victim is not None and answer.ttft_s is not None:
                break
            await self._swarm.idle(entry)
        else:
            raise P2PLLMError(f"in {ATTEMPTS} answers no chain had a {role} stage that could be lost")
        following = await self._ask(entry, self._request(greedy=True), NEXT_TOKENS)
        recomputed, lost = self._cost(entry.rerouted, loss.victim, request)
        if frozen:
            loss.victim.thaw()
        else:
            await self._swarm.revive(loss.victim)
        await self._swarm.whole()
        other = next(host for host in self._swarm.hosts if host is not entry)
        again = await self._ask(other, request, self._bench.tokens)
        if again.failure:
            raise P2PLLMError(f"no answer even without a loss: {again.failure}")
        return Run(
            role=role,
            chain=loss.chain,
            frozen=frozen,
            struck=loss.struck,
            failure=answer.failure,
            identical=not answer.failure and self._is_same(request, answer.tokens, again.tokens),
            parted=None if answer.failure else parting(answer.tokens, again.tokens),
            pause_s=round(longest_wait(answer.arrivals, loss.struck), 4),
            recomputed=recomputed,
            lost=lost,
            ttft_s=round(answer.ttft_s, 4),
            next_ttft_s=None if following.ttft_s is None else round(following.ttft_s, 4),
        )

    def _attempts(self, role: str, *, frozen: bool, greedy: bool) -> Iterator[tuple[Host, _Request, Loss]]:
        """Entries in turn, each with a request of its own and a loss to come at a random token."""
        for entry in itertools.islice(self._entries, ATTEMPTS):
            after = self._rng.randint(EARLIEST, self._bench.tokens - LATEST)
            loss = Loss(self._swarm, entry, role, frozen=frozen, after=after)
            yield entry, self._request(greedy=greedy), loss

    async def _ask(
        self,
        entry: Host,
        request: _Request,
        tokens: int,
        meanwhile: Callable[[int], Awaitable[bool]] | None = None,
    ) -> _Answer:
        """One answer, to its end, or until ``meanwhile``, which hears how many pieces came, says False."""
        loop = asyncio.get_running_loop()
        answer = _Answer(loop.time())
        try:
            async with (
                asyncio.timeout(ANSWER_S),
                api_client(entry.url) as client,
                aclosing(client.chat(request.messages, **request.options(tokens))) as pieces,
            ):
                async for piece in pieces:
                    if isinstance(piece, Figures):
                        answer.tokens = piece.token_ids
                        continue
                    answer.arrivals.append(loop.time())
                    if meanwhile is not None and not await meanwhile(len(answer.arrivals)):
                        break
        except TimeoutError:
            answer.failure = f"no end after {ANSWER_S:.0f} s"
        except P2PLLMError as error:
            answer.failure = str(error)
        return answer

    def _request(self, *, greedy: bool) -> _Request:
        number = next(self._stories)
        messages = [{"role": "user", "content": STORY.format(number=number)}]
        return _Request(messages, SamplingParams(0.0 if greedy else TEMPERATURE, seed=number))

    def _cost(
        self, rerouted: Sequence[dict[str, Any]], victim: Host, request: _Request
    ) -> tuple[int | None, int]:
        """Layers × tokens that were computed again, and those that the victim's slice can have held."""
        if not rerouted or any("recomputed" not in event for event in rerouted):
            return None, 0
        tokens = len(self._tokenizer.encode_chat(request.messages)) + int(rerouted[0]["tokens"])
        return sum(int(event["recomputed"]) for event in rerouted), tokens * len(victim.layers)

    def _is_same(self, request: _Request, one: Sequence[int], other: Sequence[int]) -> bool:
        prompt = self._tokenizer.encode_chat(request.messages)
        return self._judge.allows(prompt, one, other, request.sampling)
