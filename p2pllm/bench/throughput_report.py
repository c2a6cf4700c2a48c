"""``bench throughput``: the table for people, the object for programs, and how the aims were met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console

from p2pllm.bench.aims import Aim, print_findings, quiet

if TYPE_CHECKING:
    from p2pllm.bench.throughput import Interference, Prefill, StreamsRow

__all__ = ["bench_throughput"]

HEADER: Final = """\
tokens per second of all streams, medians over rounds
                          transformers' own   first    ┌ interval, ms ┐
dtype      streams   ours          batching  token, s  median      p99"""

AIMS: Final = {8: 4.5, 16: 6.0}
"""Times the speed of one stream, for so many."""


async def bench_throughput(
    *, as_json: bool, model: str, dtype: str, tokens: int, rounds: int, threads: int | None
) -> int:
    """Measure, and print (rows as they come; with ``as_json`` to stderr). Raises ModelError."""
    # Not above: other benches measure a process without all this.
    from p2pllm.bench.throughput import Prefill, StreamsRow, Throughput, measure_throughput

    quiet()
    out, progress = Console(soft_wrap=True), Console(soft_wrap=True, stderr=as_json)
    progress.out(HEADER, highlight=False)
    rows: list[StreamsRow] = []
    found: dict[str, Any] = {}
    aims: list[tuple[Aim, float]] = []
    bench = Throughput(model=model, dtype=dtype, tokens=tokens, rounds=rounds, threads=threads)
    async for part in measure_throughput(bench):
        if isinstance(part, StreamsRow):
            rows.append(part)
            progress.out(_line(part), highlight=False)
        elif isinstance(part, Prefill):
            found["prefill"] = asdict(part)
            aims.append(_prefill_aim(part))
        else:
            found["interval_p99_ratio_under_prefill"] = part.ratio
            found["under_prefill"] = asdict(part)
            aims.append(_interference_aim(part))
    aims = _stream_aims(rows) + aims
    found |= {"tokens": tokens, "rounds": rounds, "rows": [asdict(row) for row in rows]}
    print_findings(out, found, aims, as_json=as_json)
    return 0


def _stream_aims(rows: Sequence[StreamsRow]) -> list[tuple[Aim, float]]:
    one = next(row.tok_s for row in rows if row.streams == 1)
    aims = []
    for row in rows:
        if row.streams in AIMS:
            aims.append((Aim(f"{row.streams} streams, times one", AIMS[row.streams]), row.tok_s / one))
            rival = row.tok_s / row.transformers_tok_s
            aims.append((Aim(f"{row.streams} streams, times transformers' batching", 1.0), rival))
    return aims


def _prefill_aim(part: Prefill) -> tuple[Aim, float]:
    aim = Aim(f"prefill of 512 tokens ({part.tok_s:.0f} tok/s), times transformers' forward", 1.0)
    return aim, part.tok_s / part.reference_tok_s


def _interference_aim(part: Interference) -> tuple[Aim, float]:
    aim = Aim("p99 interval while 2000 tokens come in, times that without", 3.0, at_most=True)
    return aim, part.ratio


def _line(row: StreamsRow) -> str:
    return (
        f"{row.dtype:10}{row.streams:8}{row.tok_s:7.1f}{row.transformers_tok_s:18.1f}{row.ttft_s:10.2f}"
        f"{row.interval_ms.median:8.1f}{row.interval_ms.p99:9.1f}"
    )
