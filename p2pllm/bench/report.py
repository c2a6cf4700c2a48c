"""``bench scheduling``: the table for people, the object for programs, and how the aims were met."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from p2pllm.bench.figure import check_plot, draw
from p2pllm.bench.fleets import DIFFERENT, LAYERS
from p2pllm.bench.scheduling import Row, all_cells, measure_all
from p2pllm.bench.spread import Spread
from p2pllm.errors import UsageError

__all__ = ["bench_scheduling"]

HEADER = """\
times in ms, median and p99; certified: plans proven optimal, of so many fleets
             ┌ widest gap ┐ ┌── Phase 1 ───┐ ┌── Phase 2 ───┐ ┌─ ρ measured ─┐  whole   one
    n type reg   k    s   ≥   median     p99   median     p99   median     p99   view record  MB certified"""

FIGURES = {"phase1_ms": "Phase 1, ms", "phase2_ms": "Phase 2, ms", "peak_mb": "memory, MB"}


@dataclass(frozen=True, slots=True)
class Aim:
    """A limit on the slowest or largest of the rows that it is about; ``None`` stands for any."""

    figure: Literal["phase1_ms", "phase2_ms", "peak_mb"]
    limit: float
    n: int
    types: int | None = None
    regions: int | None = None

    @property
    def name(self) -> str:
        """What it is about."""
        types = {None: "any", DIFFERENT: "all-different"}.get(self.types, str(self.types))
        return f"{FIGURES[self.figure]}, {self.n} peers, {types} types, {self.regions or 'any'} regions"

    def measured(self, rows: Sequence[Row]) -> float | None:
        """The worst median of its rows, None without any."""
        return max((self._of(row) for row in rows if self._is_about(row)), default=None)

    def _is_about(self, row: Row) -> bool:
        wanted = ((self.n, row.n), (self.types, row.types), (self.regions, row.regions))
        return all(mine is None or mine == its for mine, its in wanted)

    def _of(self, row: Row) -> float:
        match self.figure:
            case "phase1_ms":
                return row.phase1_ms.median
            case "phase2_ms":
                return row.phase2_ms.median
            case "peak_mb":
                return row.peak_mb


AIMS = (
    Aim("phase1_ms", 8.55, n=256, types=8, regions=4),
    Aim("phase2_ms", 1, n=256, types=8, regions=4),
    Aim("phase1_ms", 30, n=256, types=DIFFERENT),
    Aim("phase1_ms", 250, n=4096),
    Aim("phase2_ms", 20, n=4096),
    Aim("peak_mb", 200, n=4096),
)


def bench_scheduling(*, as_json: bool, plot: Path | None, quick: bool, max_peers: int, seed: int) -> int:
    """Measure, print (rows as they come; with ``as_json`` to stderr), and draw ``plot`` if asked to.

    Raises UsageError when there would be nothing to measure, and P2PLLMError when no figure could be drawn,
    before anything is measured.
    """
    cells = all_cells(max_peers, quick=quick)
    if not cells:
        raise UsageError(
            f"--max-peers {max_peers} leaves nothing to measure: the smallest swarms have 4 peers"
        )
    if plot is not None:
        check_plot(plot)
    out, progress = Console(soft_wrap=True), Console(soft_wrap=True, stderr=as_json)
    progress.out(HEADER, highlight=False)
    rows: list[Row] = []
    for row in measure_all(cells, seed, quick=quick):
        rows.append(row)
        progress.out(_line(row), highlight=False)
    if plot is not None:
        draw(rows, plot)
    if as_json:
        out.out(json.dumps(_as_object(rows)), highlight=False)
    else:
        out.out("\n".join(_closing(rows)), highlight=False)
    return 0


def _line(row: Row) -> str:
    def spread(spread: Spread | None) -> str:
        return f"{spread.median:9.2f}{spread.p99:8.2f}" if spread else f"{'-':>9}{'-':>8}"

    return (
        f"{row.n:5}{row.types or 'all':>5}{row.regions:4}{row.k:5}{row.stages:5}{row.lower_bound:5}"
        f"{spread(row.phase1_ms)}{spread(row.phase2_ms)}{spread(row.phase2_measured_ms)}"
        f"{row.compile_ms.median:8.2f}{row.update_ms.median:7.3f}{row.peak_mb:6.0f}"
        f"{row.certified:4}/{row.fleets}"
    )


def _as_object(rows: Sequence[Row]) -> dict[str, Any]:
    """What ``--json`` prints; keys are fixed, more may come."""
    return {
        "layers": LAYERS,
        "rows": [asdict(row) for row in rows],
        "aims": [asdict(aim) | {"measured": aim.measured(rows)} for aim in AIMS],
        "summary": {
            "fleets": sum(row.fleets for row in rows),
            "certified": sum(row.certified for row in rows),
            "widest_gap_stages": max(row.stages - row.lower_bound for row in rows),
        },
    }


def _closing(rows: Sequence[Row]) -> list[str]:
    """How many plans are certified, and the aims that the rows can answer."""
    fleets, optimal = sum(row.fleets for row in rows), sum(row.certified for row in rows)
    widest = max(row.stages - row.lower_bound for row in rows)
    share = f"{optimal / fleets:.1%}"
    lines = [f"{optimal} of {fleets} plans ({share}) proven optimal, widest gap {widest} stages"]
    for aim in AIMS:
        measured = aim.measured(rows)
        if measured is not None:
            missed = ": missed" if measured > aim.limit else ""
            lines.append(f"{aim.name}: {measured:.2f}, aim {aim.limit:g}{missed}")
    return lines
