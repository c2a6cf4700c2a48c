"""``bench recovery``: the table for people, the object for programs, and how the aims were met."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

from rich.console import Console

from p2pllm.bench.aims import Aim, print_findings, quiet
from p2pllm.bench.recovery_runs import Run, Summary

__all__ = ["aims_of", "bench_recovery"]

HEADER: Final = """\
                       at          longest  computed again,    first token, s
lost     of          piece tokens wait, s  layers × tokens    before    next"""


QUICK_RUNS: Final = 9


async def bench_recovery(*, as_json: bool, model: str, runs: int, tokens: int, quick: bool, seed: int) -> int:
    """Measure, and print (runs as they come; with ``as_json`` to stderr). Raises ModelError, P2PLLMError."""
    # Not above: other benches measure a process without all this.
    from p2pllm.bench.recovery import Recovery, measure_recovery

    quiet()
    out, progress = Console(soft_wrap=True), Console(soft_wrap=True, stderr=as_json)
    progress.out(HEADER, highlight=False)
    found: list[Run] = []
    runs = min(runs, QUICK_RUNS) if quick else runs
    async for run in measure_recovery(Recovery(model=model, runs=runs, tokens=tokens, seed=seed)):
        found.append(run)
        progress.out(_line(run), highlight=False)
    summary = Summary.of(found)
    rows = {"tokens": tokens, "rows": [asdict(run) for run in found]}
    print_findings(out, asdict(summary) | rows, aims_of(summary), as_json=as_json)
    return 0


def aims_of(summary: Summary) -> list[tuple[Aim, float]]:
    """Each with what was measured, as far as it was."""
    aims = [
        (Aim("complete answers, of all", 1.0), summary.completed / summary.runs),
        (Aim("answers with the tokens they would have had, of all", 1.0), summary.identical / summary.runs),
    ]
    pauses = (("a kill", summary.pause_s, 0.25, 1.0), ("a freeze", summary.freeze_pause_s, 1.5, 1.5))
    for what, pause, middle, worst in pauses:
        if pause is not None:
            aims.append((Aim(f"pause after {what}, median s", middle, at_most=True), pause.median))
            aims.append((Aim(f"pause after {what}, p99 s", worst, at_most=True), pause.p99))
    if summary.recomputed_share is not None:
        name = "computed again, times what the lost peer's slice can have held"
        aims.append((Aim(name, 1.0, at_most=True), summary.recomputed_share))
    if summary.next_ttft_ratio is not None:
        name = "first token of the next request, times that before the loss"
        aims.append((Aim(name, 1.5, at_most=True), summary.next_ttft_ratio))
    return aims


def _line(run: Run) -> str:
    what = f"{run.role:9}{run.chain}, {'frozen' if run.frozen else 'killed'}"
    same = (
        "failed" if run.failure else "other" if not run.identical else "same" if run.parted is None else "tie"
    )
    recomputed = "-" if run.recomputed is None else f"{run.recomputed} of {run.lost}"
    following = "-" if run.next_ttft_s is None else f"{run.next_ttft_s:.2f}"
    return (
        f"{what:20}{run.struck:8} {same:6}{run.pause_s:8.2f}{recomputed:>17}{run.ttft_s:10.2f}{following:>8}"
        f"  {run.failure}"
    ).rstrip()
