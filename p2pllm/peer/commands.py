"""What the operator tells a peer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from p2pllm.portrait import Portrait
from p2pllm.swarm import Allocation

__all__ = ["Commands"]

log = structlog.get_logger()


class Commands:
    """Takes commands; nothing here waits until they are done."""

    def __init__(self, portrait: Portrait, allocation: Allocation, changed: Callable[[], None]) -> None:
        """``changed`` is told that there may be layers to drop or to load, and news for the swarm."""
        self.leaving = asyncio.Event()
        self._portrait = portrait
        self._allocation = allocation
        self._changed = changed

    def replan(self, *, force: bool) -> None:
        """Ask the leader for a new placement, in this peer's record."""
        self._portrait.replans += 1
        self._portrait.force = force
        log.info("replan_requested", force=force)
        self._changed()

    def leave(self) -> None:
        """Hand over, finish, and end."""
        self.leaving.set()

    def pause(self) -> None:
        """Hand the layers over and hold none."""
        self._portrait.paused = True
        self._allocation.pause()
        self._changed()

    def resume(self) -> None:
        """Take layers again."""
        self._portrait.paused = False
        self._allocation.resume()
        self._changed()
