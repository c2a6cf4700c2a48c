"""``bench decode``: the table for people, the object for programs, and how the aims were met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console

from p2pllm.bench.aims import Aim, print_findings, quiet

if TYPE_CHECKING:
    from p2pllm.bench.decode import DecodeRow

__all__ = ["bench_decode"]

HEADER: Final = """\
tokens per second, medians over rounds          ─ 1 thread each ─   per hop share of   same  per-
weights          threads generate   one stage  one stage 3 stages      ms  copying tokens plexity"""

LEAST: Final = {"float32": 1.6, "bfloat16": 1.4}
"""Times the speed of transformers' ``generate``."""


async def bench_decode(*, as_json: bool, model: str, tokens: int, rounds: int, threads: int | None) -> int:
    """Measure, and print (rows as they come; with ``as_json`` to stderr). Raises ModelError, P2PLLMError."""
    # Not above: other benches measure a process without all this.
    from p2pllm.bench.decode import Decode, DecodeRow, measure_decode

    quiet()
    out, progress = Console(soft_wrap=True), Console(soft_wrap=True, stderr=as_json)
    progress.out(HEADER, highlight=False)
    rows: list[DecodeRow] = []
    found: dict[str, Any] = {}
    async for row in measure_decode(Decode(model=model, tokens=tokens, rounds=rounds, threads=threads)):
        if isinstance(row, DecodeRow):
            rows.append(row)
            progress.out(_line(row), highlight=False)
        else:
            found["llama_cpp"] = asdict(row)
            progress.out(f"llama.cpp, {row.file}, {row.threads} threads: {row.tok_s}", highlight=False)
    aims = _aims(rows)
    found |= {"tokens": tokens, "rounds": rounds, "rows": [asdict(row) for row in rows]}
    print_findings(out, found, aims, as_json=as_json)
    return 0


def _aims(rows: Sequence[DecodeRow]) -> list[tuple[Aim, float]]:
    """Each with what was measured."""
    aims = []
    for row in rows:
        name = _name(row)
        speed = row.one_stage_tok_s / row.generate_tok_s
        if row.quant == "none":
            aims.append((Aim(f"{name}, one stage, times generate", LEAST[row.dtype]), speed))
        elif row.quant == "int4":
            aims.append((Aim(f"{name}, one stage, times generate in float32", 4.0), speed))
        kept = row.three_stage_tok_s / row.one_thread_tok_s
        aims.append((Aim(f"{name}, three stages, times one with as many threads", 0.85), kept))
        aims.append((Aim(f"{name}, per hop, ms", 0.25, at_most=True), row.hop_ms))
    return aims


def _line(row: DecodeRow) -> str:
    return (
        f"{_name(row):17}{row.threads:7}{row.generate_tok_s:9.1f}{row.one_stage_tok_s:7.1f}"
        f" ×{row.one_stage_tok_s / row.generate_tok_s:4.2f}{row.one_thread_tok_s:10.1f}"
        f"{row.three_stage_tok_s:9.1f}{row.hop_ms:10.2f}{row.copy_share:9.2f}{row.agreement:8.1%}{row.perplexity:7.2f}"
    )


def _name(row: DecodeRow) -> str:
    return row.dtype if row.quant == "none" else f"{row.dtype} {row.quant}"
