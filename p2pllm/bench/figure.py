"""The figure of ``bench scheduling``: time against the size of the swarm, beside what others take."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from p2pllm.bench.fleets import DIFFERENT
from p2pllm.bench.scheduling import Row
from p2pllm.errors import P2PLLMError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["check_plot", "draw"]

FORMATS = (".pdf", ".png", ".svg")

REGIONS = 4
"""The figure is of fleets in so many regions."""

COLOURS = {1: "#9ecae1", 2: "#6baed6", 4: "#3182bd", 8: "#08519c", DIFFERENT: "#d95f0e"}
"""Lines by number of types: the more, the darker."""

_Times: TypeAlias = Mapping[int, float]
"""Milliseconds by number of peers."""


class Panel(NamedTuple):
    """One phase, with figures of others: medians in ms by number of peers."""

    title: str
    figure: Literal["phase1_ms", "phase2_ms"]
    paper: _Times
    rivals: Mapping[str, _Times]


# Figure 5 of the Parallax paper; and its released code (GradientHQ/parallax 162354a), placing the same fleets
# on one core of a machine like ours, as far as it came within a minute.
PANELS = (
    Panel(
        "Phase 1: placement",
        "phase1_ms",
        paper={4: 0.10, 256: 8.55},
        rivals={
            "DP, 1 type": {8: 0.51, 16: 3.6, 32: 74, 64: 4876},
            "DP, 8 types": {8: 2.1, 16: 4481},
            "greedy, 8 types": {8: 0.32, 16: 0.72, 32: 1.9, 64: 4.6, 128: 11, 256: 31},
        },
    ),
    Panel(
        "Phase 2: one chain",
        "phase2_ms",
        paper={4: 0.01, 256: 6.63},
        rivals={
            "DP, 1 type": {8: 0.16, 16: 0.56, 32: 5.1, 64: 16, 128: 69, 256: 209},
            "DP, 8 types": {8: 0.08, 16: 0.17, 32: 0.38, 64: 1.3, 128: 3.9, 256: 14},
            "by layers, 8 types": {8: 8.4, 16: 14, 32: 54, 64: 254, 128: 942, 256: 4018},
        },
    ),
)


def check_plot(path: Path) -> None:
    """Raise P2PLLMError when no figure could be drawn there, or at all."""
    if importlib.util.find_spec("matplotlib") is None:
        raise P2PLLMError("--plot draws with matplotlib: pip install 'p2pllm[plots]'")
    if path.suffix not in FORMATS:
        raise P2PLLMError(f"--plot {path} is of no known format: end it in {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise P2PLLMError(f"--plot {path}: there is no folder {path.parent}")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw both phases' medians against the number of peers, on log scales, into ``path``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    for panel, axis in zip(PANELS, axes, strict=True):
        _draw_panel(panel, axis, [row for row in rows if row.regions == REGIONS])
    axes[0].set_ylabel("median, ms")
    figure.suptitle(f"Scheduling 64 layers on peers in {REGIONS} regions, one core")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise P2PLLMError(f"cannot write {path}: {error.strerror}") from error


def _draw_panel(panel: Panel, axis: Axes, rows: Sequence[Row]) -> None:
    for types, colour in COLOURS.items():
        kind = "all peers different" if types == DIFFERENT else f"{types} GPU type{'s' * (types > 1)}"
        ours = {row.n: getattr(row, panel.figure).median for row in rows if row.types == types}
        if ours:
            _draw_line(axis, ours, "o-", color=colour, markersize=4, label=f"p2pllm, {kind}")
    for number, (name, times) in enumerate(panel.rivals.items()):
        label = "" if number else "Parallax's released code (no regions)"
        _draw_line(axis, times, "--", color="0.55", linewidth=1.2, label=label)
        last = max(times)
        axis.annotate(name, (last, times[last]), (5, -3), textcoords="offset points", color="0.4", fontsize=8)
    _draw_line(axis, panel.paper, "*", color="black", markersize=11, label="Parallax paper, Fig 5")
    axis.set_title(panel.title)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("peers")
    for scale in (axis.xaxis, axis.yaxis):
        scale.set_major_formatter(lambda value, _: f"{value:g}")
    axis.grid(True, which="major", color="0.9")


def _draw_line(axis: Axes, times: _Times, style: str, **how: Any) -> None:
    axis.plot(list(times), list(times.values()), style, **how)
