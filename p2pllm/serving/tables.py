"""What people see of the swarm. Names come from strangers, so nothing here is read as markup."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from p2pllm.config import format_bytes

__all__ = ["make_console", "print_swarm", "ranges", "swarm_table"]


WIDE = 100
"""Columns from which on a terminal has room for KV blocks and the hardware."""


def make_console(*, stderr: bool = False) -> Console:
    """A console that prints what it is given, and nothing as markup."""
    return Console(stderr=stderr, markup=False, highlight=False)


def ranges(spans: Iterable[tuple[int, int]]) -> str:
    """Layer ranges for people: ``0:3, 7:9``."""
    return ", ".join(f"{start}:{end}" for start, end in spans)


def print_swarm(console: Console, swarm: dict[str, Any]) -> None:
    """Print the body of ``/api/swarm`` as a table: peer, region, layers, τ, memory; KV blocks and
    hardware if they fit.
    """
    console.print(swarm_table(console, swarm))


def swarm_table(console: Console, swarm: dict[str, Any]) -> Table:
    """What ``print_swarm`` prints."""
    is_wide = console.width >= WIDE
    title = f"{swarm['model']} · {swarm['layers']} layers · swarm {swarm['swarm'][:8]}"
    missing = ranges(swarm["missing"])
    table = Table(
        title=Text(title),
        caption=Text(f"no peer serves layers {missing}", style="bold red") if missing else _plan(swarm),
        title_justify="left",
        caption_justify="left",
    )
    for heading in ("peer", "region", "layers"):
        table.add_column(heading)
    for heading in ("τ", "memory"):
        table.add_column(heading, justify="right")
    if is_wide:
        table.add_column("KV blocks")
        table.add_column("hardware")
    for peer in sorted(swarm["peers"], key=_place):
        spans = (
            ranges([(span["start"], span["end"])]) + ("" if span["state"] == "ready" else f" {span['state']}")
            for span in peer["spans"]
        )
        what = "leaving" if peer["leaving"] else "paused" if peer["paused"] else "no layers yet"
        cells = [
            peer["peer"][:8] + (" (this one)" if peer["peer"] == swarm["self"] else ""),
            peer["region"],
            ", ".join(spans) or what,
            f"{peer['tau_s'] * 1000:.1f} ms" if peer["tau_s"] else "–",
            f"{format_bytes(peer['memory_used'])} of {format_bytes(peer['memory_bytes'])}",
        ]
        if is_wide:
            cells += [f"{peer['free_kv_blocks']} free, {peer['cached_kv_blocks']} cached", peer["hardware"]]
        table.add_row(*map(Text, cells))
    return table


def _plan(swarm: dict[str, Any]) -> Text | None:
    """The plan in a line: who made it, and what it is worth."""
    plan = swarm["plan"]
    if plan is None:
        return None
    line = f"epoch {swarm['epoch']}, leader {(swarm['leader'] or 'none')[:8]}, plan {plan['number']}"
    if plan["replicas"]:
        k, stages, z = plan["replicas"], plan["stages"], plan["z"]
        line += f": {k} × the model in {stages} stages, Z({k}) = {z:.3g}"
    return Text(line)


def _place(peer: dict[str, Any]) -> tuple[int, str]:
    """In the order in which a chain runs; peers without layers last."""
    return min((span["start"] for span in peer["spans"]), default=2**31), peer["peer"]
