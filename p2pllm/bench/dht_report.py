"""``bench dht``: the table for people, the object for programs, and how the aims were met."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console

from p2pllm.bench.spread import Spread

if TYPE_CHECKING:
    from p2pllm.bench.dht import Row

__all__ = ["bench_dht"]

HEADER = """\
median and p99; rates are those of one peer; missing: from views, of so many looks
                ┌─ age, s ───┐┌─ event, s ─┐ ┌ publish, ms ┐  join  gone ┌──── kB/s ────┐ data- % of
peers scenario  median    p99 median    p99  median    p99     s     s    in   out links grams core missing"""


@dataclass(frozen=True, slots=True)
class Aim:
    """A limit on one figure of a swarm of so many ``peers`` in one scenario."""

    name: str
    limit: float
    figure: Callable[[Row], float | None]
    peers: int = 64
    scenario: str = "healthy"

    def measured(self, rows: Sequence[Row]) -> float | None:
        """The figure of the row that it is about, None without that."""
        mine = (row for row in rows if (row.peers, row.scenario) == (self.peers, self.scenario))
        return next((self.figure(row) for row in mine), None)

    def says(self, rows: Sequence[Row]) -> str:
        """One line for people, empty if the rows do not tell."""
        measured = self.measured(rows)
        if measured is None:
            return ""
        missed = ": missed" if measured > self.limit else ""
        return f"{self.name}, {self.peers} peers, {self.scenario}: {measured:.4g}, aim {self.limit:g}{missed}"


AIMS = (
    Aim("age of records, median s", 0.8, lambda row: row.age_s.median),
    Aim("age of records, p99 s", 1.8, lambda row: row.age_s.p99),
    Aim("event in every view, p99 s", 0.6, lambda row: row.event_s.p99 if row.event_s else None),
    Aim("join to full view, s", 2.0, lambda row: row.join_s),
    Aim("received, kB/s", 30.0, lambda row: row.kb_per_s),
    Aim("received, kB/s", 8.0, lambda row: row.kb_per_s, scenario="idle"),
    Aim("CPU, % of a core", 0.5, lambda row: row.cpu_percent, scenario="idle"),
    Aim("received, kB/s", 150.0, lambda row: row.kb_per_s, peers=256),
    Aim("CPU, % of a core", 5.0, lambda row: row.cpu_percent, peers=256),
)


def bench_dht(
    *,
    as_json: bool,
    peers: int,
    scenarios: Sequence[str],
    seconds: float,
    processes: int,
    encrypted: bool,
    seed: int,
) -> int:
    """Measure, and print (rows as they come; with ``as_json`` to stderr).

    Raises UsageError when there would be nothing to measure, and P2PLLMError if a process is lost.
    """
    # Not above: the memory that `bench scheduling` measures would be that of all these.
    from p2pllm.bench.dht import measure_all
    from p2pllm.bench.samples import Setting

    out, progress = Console(soft_wrap=True), Console(soft_wrap=True, stderr=as_json)
    progress.out(HEADER, highlight=False)
    rows: list[Row] = []
    for row in measure_all(scenarios, peers, seconds, processes, Setting(encrypted=encrypted, seed=seed)):
        rows.append(row)
        progress.out(_line(row), highlight=False)
    if as_json:
        out.out(json.dumps(_as_object(rows, encrypted=encrypted)), highlight=False)
    else:
        out.out("\n".join(filter(None, (aim.says(rows) for aim in AIMS))), highlight=False)
    return 0


def _line(row: Row) -> str:
    def spread(spread: Spread | None, digits: int) -> str:
        return f"{spread.median:7.{digits}f}{spread.p99:7.{digits}f}" if spread else f"{'-':>7}{'-':>7}"

    def seconds(value: float | None) -> str:
        return f"{'-':>6}" if value is None else f"{value:6.2f}"

    return (
        f"{row.peers:5} {row.scenario:9}{spread(row.age_s, 2)}{spread(row.event_s, 2)} "
        f"{spread(row.publish_ms, 1)}{seconds(row.join_s)}{seconds(row.gone_s)}"
        f"{row.kb_per_s:6.1f}{row.kb_sent_per_s:6.1f}{row.link_kb_per_s:6.1f}{row.datagrams_per_s:7.1f}"
        f"{row.cpu_percent:5.2f} {row.missing_records}/{row.looked_records}"
    )


def _as_object(rows: Sequence[Row], *, encrypted: bool) -> dict[str, Any]:
    """What ``--json`` prints; keys are fixed, more may come."""
    return {
        "encrypted": encrypted,
        "rows": [asdict(row) for row in rows],
        "aims": [
            {"name": aim.name, "peers": aim.peers, "scenario": aim.scenario, "limit": aim.limit}
            | {"measured": aim.measured(rows)}
            for aim in AIMS
        ],
    }
