"""A stand-in for chains in virtual time: requests share steps, which take the longer the more there are."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from p2pllm.serving.front.admission import Admission, Outlook
from p2pllm.serving.front.fair_queue import Ticket
from p2pllm.serving.front.keys import Client

Curve = Callable[[int], float]
"""Seconds of a step for so many requests."""


@dataclass(eq=False)
class Job:
    """One request: when it came, how many tokens it wants, and what became of it."""

    came: float
    client: Client
    tokens: int
    done: list[float] = field(default_factory=list)
    refused: float | None = None
    """The time after which it is to come again."""
    ticket: Ticket | None = None

    @property
    def took(self) -> float:
        return self.done[-1] - self.came

    @property
    def interval(self) -> float:
        return (self.done[-1] - self.done[0]) / max(1, len(self.done) - 1)

    @property
    def complete(self) -> bool:
        return len(self.done) == self.tokens


def simulate(curve: Curve, jobs: Iterable[Job], until: float, admission: Admission | None = None) -> None:
    """Run jobs, in the order in which they come, through an entry's admission, step by step."""
    admission = admission or Admission()
    coming = sorted(jobs, key=lambda job: job.came, reverse=True)
    waiting: dict[Ticket, Job] = {}
    running: dict[Ticket, Job] = {}
    started: dict[Ticket, float] = {}
    now = 0.0
    while now < until and (coming or waiting or running):
        if not running and not waiting:
            now = max(now, coming[-1].came)
        while coming and coming[-1].came <= now:
            job = coming.pop()
            job.ticket = Ticket(job.client, float(job.tokens), job.came)
            waiting[job.ticket] = job
            if (full := admission.enter(job.ticket, now)) is not None:
                waiting.pop(full[0]).refused = full[1].retry_after_s
        while ticket := admission.next(now, lambda _: Outlook()):
            running[ticket], started[ticket] = waiting.pop(ticket), now
        now += curve(len(running))
        count = len(running)
        for ticket, job in list(running.items()):
            if job.done:
                admission.limit.note(count, now - job.done[-1], now)
            job.done.append(now)
            if job.complete:
                del running[ticket]
                admission.end(ticket, float(job.tokens), now - started[ticket], now)


def crowd(rng: random.Random, per_s: float, until: float, clients: list[Client], tokens: int) -> list[Job]:
    """Requests at random times, of ``tokens`` tokens on average."""
    jobs, now = [], 0.0
    while (now := now + rng.expovariate(per_s)) < until:
        jobs.append(Job(now, rng.choice(clients), 2 + int(rng.expovariate(1 / tokens))))
    return jobs
