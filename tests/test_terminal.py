"""What a person sees while a peer starts."""

from __future__ import annotations

import asyncio
import io
from typing import Any

from rich.console import Console

from p2pllm import terminal


class Starting:
    """An API of a peer that says one thing after the other, and then is ready."""

    def __init__(self, bodies: list[dict[str, Any]]) -> None:
        self.bodies = bodies

    async def ready(self) -> bool:
        return not self.bodies

    async def swarm(self) -> dict[str, Any]:
        return self.bodies.pop(0)


def body(state: str, *, loading: float | None, missing: list[tuple[int, int]]) -> dict[str, Any]:
    own = {"peer": "a", "spans": [{"start": 0, "end": 4, "state": state}]}
    return {
        "self": "a",
        "peers": [own],
        "missing": missing,
        "loading": loading,
        "bootstrap": "",
        "contacts": 1,
    }


async def test_one_bar_for_a_load(monkeypatch: Any) -> None:
    monkeypatch.setattr(terminal, "READY_POLL_S", 0.2)  # it is drawn ten times a second
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    client: Any = Starting(
        [
            body("loading", loading=None, missing=[(0, 8)]),
            body("loading", loading=0.25, missing=[(0, 8)]),
            body("ready", loading=0.25, missing=[(4, 8)]),
        ]
    )
    await terminal._until_ready(client, console, asyncio.Event())
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    first, second = shown.index("loading layers (Ctrl-C"), shown.index("loading layers, 25% of them are here")
    assert first < second < shown.index("waiting for peers that serve layers 4:8")
