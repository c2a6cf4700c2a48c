"""The swarm as a table for people."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from p2pllm.config import format_bytes

__all__ = ["swarm_table"]


def swarm_table(swarm: dict[str, Any]) -> Table:
    """A rich table of the body of ``/api/swarm``: peer, region, layers, τ, memory."""
    missing = ", ".join(f"{start}:{end}" for start, end in swarm["missing"])
    table = Table(
        title=f"{swarm['model']} · {swarm['layers']} layers · swarm {swarm['swarm'][:8]}",
        caption=f"no peer serves layers {missing}" if missing else None,
        caption_style="bold red",
        title_justify="left",
    )
    for heading, justify in (
        ("peer", "left"),
        ("region", "left"),
        ("layers", "left"),
        ("τ", "right"),
        ("memory", "right"),
        ("hardware", "left"),
    ):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for peer in swarm["peers"]:
        spans = ", ".join(
            f"{span['start']}:{span['end']}" + ("" if span["state"] == "ready" else f" {span['state']}")
            for span in peer["spans"]
        )
        table.add_row(
            peer["peer"][:8] + (" (this one)" if peer["peer"] == swarm["self"] else ""),
            peer["region"],
            spans or "starting",
            f"{peer['tau_s'] * 1000:.1f} ms" if peer["tau_s"] else "–",
            f"{format_bytes(peer['memory_used'])} of {format_bytes(peer['memory_bytes'])}",
            peer["hardware"],
        )
    return table
