"""How many threads compute, and how they wait for each other."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

__all__ = ["default_threads", "in_own_thread", "wait_briefly"]

_SPINS: Final = "3000"
"""Times that a thread looks for the others before it sleeps: for about as long as waking it takes."""

T = TypeVar("T")


def wait_briefly() -> None:
    """Let threads that compute together sleep soon when they wait. To be called before torch is imported.

    GNU's OpenMP has them spin for milliseconds. Where anything else wants the core that one of them needs,
    every step then waits for the scheduler a hundred times: on two busy cores a step took forty times as
    long, and with this twice as long. On idle ones it costs a few percent.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


def default_threads(local_peers: int) -> int:
    """This peer's share of the cores: peers that each take all cores are many times slower."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(1, local_peers))


def in_own_thread(work: Callable[[], T]) -> T:
    """Do ``work`` in a thread that ends with it. Blocks the calling thread.

    OpenMP keeps a team for every thread that has once computed with several, for as long as it lives. With
    more in all teams than cores none of them spins any more when it waits: steps take a third longer.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()
