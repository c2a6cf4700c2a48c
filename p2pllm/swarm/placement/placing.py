"""Phase 1 beside the event loop: for hundreds of peers it takes seconds, in which all else must go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from p2pllm.scheduling import Assignment, Network, Offer, Plan, place
from p2pllm.swarm.view import PeerState

__all__ = ["Facts", "Place", "Placing", "Question", "place_now"]


@dataclass(frozen=True, slots=True)
class Facts:
    """What a placement was made from: the live peers, the ways between them, and who held what."""

    states: tuple[PeerState, ...]
    network: Network
    today: Assignment


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """What is to be placed. Two are never the same, whatever they ask."""

    layers: int
    offers: tuple[Offer, ...]
    facts: Facts


Place: TypeAlias = Callable[[Question], Plan | None]
"""Answers a question; None: not yet, to be asked again. Raises ModelError if there is no placement."""


def place_now(question: Question) -> Plan:
    """Answer a question, however long that takes. Raises ModelError if there is no placement."""
    facts = question.facts
    return place(question.layers, question.offers, facts.network, today=facts.today)


class Placing:
    """Answers one question at a time on another thread; a ``Place`` for the event loop's thread.

    A question that is not asked again was given up, and the next one waits until its answer has come.
    """

    def __init__(self, done: Callable[[], None], answer: Callable[[Question], Plan] = place_now) -> None:
        """``done`` is called when it is worth asking again."""
        self._done = done
        self._answer = answer
        self._question: Question | None = None
        self._future: asyncio.Future[Plan] | None = None

    def __call__(self, question: Question) -> Plan | None:
        """The answer, once it is there."""
        if self._future is not None and not self._future.done():
            return None
        future, self._future = self._future, None
        if future is not None and question is self._question:
            return future.result()
        self._question = question
        self._future = asyncio.get_running_loop().run_in_executor(None, self._answer, question)
        self._future.add_done_callback(self._came)
        return None

    def _came(self, future: asyncio.Future[Plan]) -> None:
        if not future.cancelled():
            future.exception()  # whoever asked may have given up, and then it is nobody's concern
        self._done()
