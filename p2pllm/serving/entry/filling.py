"""How stages are made ready to take over while those that they replace still work.

They are opened as part of a chain to come, and filled with what the stage before them has kept, or with the
tokens. When that chain begins, they lack no more than the tokens of the meantime.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from p2pllm.scheduling import Chain, PeerId, Stage
from p2pllm.serving.entry.opening import feeding, opening
from p2pllm.serving.entry.prefix import prefix_names
from p2pllm.serving.entry.reaching import reach, short, tell
from p2pllm.serving.entry.request import Generation, Network
from p2pllm.serving.entry.trouble import StageLostError, problem_of
from p2pllm.transport import Failed, Message, Opened, Replay, Resume, Where

__all__ = ["Filling"]

NEVER = 2**31 - 1
"""A position that no session comes to: nothing is sent on."""

ANSWER_S = 2.0
PROGRESS_S = 5.0
"""Who has not come further in this time will not."""

POLL_S = 0.05


class Filling:
    """The new stages of ``chain``, which is to follow ``present``. Frames arrive through ``receive``."""

    def __init__(
        self, chain: Chain, present: Chain, *, session: str, generations: tuple[int, int], network: Network
    ) -> None:
        """``generations`` are those of ``present`` and of ``chain``."""
        self.chain = chain
        self.generation = generations[1]
        self.newcomers = {
            index: stage for index, stage in enumerate(chain.stages) if stage not in present.stages
        }
        self._present = present
        self._session = session
        self._present_generation = generations[0]
        self._network = network
        self._answers: dict[int, Opened] = {}
        self._problem: StageLostError | None = None
        self._news = asyncio.Event()

    def receive(self, sender: PeerId, message: Opened | Failed) -> None:
        """Take in a frame of the chain to come."""
        stage = self.newcomers.get(message.stage)
        if stage is None or stage.peer != sender:
            return
        if isinstance(message, Failed):
            self._problem = self._problem or problem_of(message, sender, ())
        else:
            self._answers[message.stage] = message
        self._news.set()

    async def run(self, request: Generation, known: tuple[int, ...]) -> int:
        """Open the stages, and fill them with all ``known`` tokens but the last.

        Returns how many layer-tokens they compute. Raises StageLostError when one of them cannot be had.
        """
        if not self.newcomers:
            return 0
        await reach({stage.peer for stage in self.newcomers.values()}, self._network.connect)
        prefix = prefix_names(known, self._network.secret)
        for index, stage in self.newcomers.items():
            plan = opening(
                self.chain,
                index,
                session=self._session,
                generation=self.generation,
                request=request,
                known=known,
                prefix=prefix,
                network=self._network,
            )
            self._tell(stage.peer, plan)
        await self._until(lambda: self._answers.keys() >= self.newcomers.keys(), ANSWER_S)
        held = {index: self._answers[index].held for index in self.newcomers}
        for index, stage in self.newcomers.items():
            forward_from = held.get(index + 1, NEVER)
            self._tell(stage.peer, Resume(self._session, index, self.generation, forward_from))
        end = len(known) - 1
        for index, stage in self.newcomers.items():
            if index - 1 not in self.newcomers:
                self._feed(index, stage, held[index], known[:end])
        await self._arrive(end)
        layers = {index: stage.end - stage.start for index, stage in self.newcomers.items()}
        return sum((end - min(end, held[index])) * layers[index] for index in self.newcomers)

    def _feed(self, index: int, stage: Stage, start: int, known: tuple[int, ...]) -> None:
        """Have a stage get what it lacks: the tokens, or what the stage before it has kept."""
        if index == 0:
            for chunk in feeding(self._session, self.generation, known, start, sample=False):
                self._tell(stage.peer, chunk)
        elif start < len(known):
            before = self.chain.stages[index - 1]
            order = Replay(
                session=self._session,
                stage=self._present.stages.index(before),
                generation=self._present_generation,
                peer=stage.peer,
                to_stage=index,
                to_generation=self.generation,
                start=start,
                end=len(known),
            )
            self._tell(before.peer, order)

    async def _arrive(self, end: int) -> None:
        """Wait until all have run ``end`` tokens."""
        clock = asyncio.get_running_loop().time
        before, since = -1, clock()
        while (reached := min(answer.held for answer in self._answers.values())) < end:
            if reached > before:
                before, since = reached, clock()
            if clock() - since > PROGRESS_S:
                raise StageLostError(self._peers(), f"{short(self._peers())} could not be filled")
            await asyncio.sleep(POLL_S)
            for index, stage in self.newcomers.items():
                self._tell(stage.peer, Where(self._session, index, self.generation))
            self._check()

    async def _until(self, is_done: Callable[[], bool], seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not is_done():
                    await self._news.wait()
                    self._news.clear()
                    self._check()
        except TimeoutError:
            raise StageLostError(self._peers(), f"no answer from {short(self._peers())}") from None

    def _check(self) -> None:
        if self._problem is not None:
            raise self._problem

    def _peers(self) -> set[PeerId]:
        return {stage.peer for stage in self.newcomers.values()}

    def _tell(self, peer: PeerId, message: Message) -> None:
        tell(self._network, peer, message)
