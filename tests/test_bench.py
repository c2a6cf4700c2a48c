"""``bench scheduling``: what it prints and draws, not how fast it is."""

from __future__ import annotations

import json
import re
import sys

import pytest
from PIL import Image

from p2pllm.bench import bench_scheduling
from p2pllm.bench.scheduling import Cell, measure
from p2pllm.cli import main
from p2pllm.errors import P2PLLMError


def test_an_object_and_a_figure(tmp_path, capsys):
    figure = tmp_path / "times.png"
    arguments = ["bench", "scheduling", "--quick", "--max-peers", "8", "--json", "--plot", str(figure)]
    assert main(arguments) == 0
    printed = json.loads(capsys.readouterr().out)
    rows = printed["rows"]
    cells = [(row["n"], row["types"], row["regions"]) for row in rows]
    assert cells == [(n, types, regions) for n in (4, 8) for types in (8, 0) for regions in (1, 4)]
    for row in rows:
        for phase in ("phase1_ms", "phase2_ms", "phase2_measured_ms"):
            assert 0 < row[phase]["median"] <= row[phase]["p99"]
        assert 1 <= row["k"] <= row["lower_bound"] <= row["stages"] <= row["n"]
        # Peers so few are placed optimally, and that is known.
        assert row["stages"] == row["lower_bound"]
        assert row["certified"] == row["fleets"] == 2
        assert 10 < row["peak_mb"] < 200
    assert printed["summary"] == {"fleets": 16, "certified": 16, "widest_gap_stages": 0}
    with Image.open(figure) as image:
        assert image.format == "PNG"


def test_a_cell_worked_by_hand():
    """22 layers on each of 8 peers: three hold 64, six hold them twice; two in a region do not."""
    rows = [measure(Cell(8, 1, regions), 0, quick=True) for regions in (1, 4)]
    assert [(row.k, row.stages, row.lower_bound) for row in rows] == [(2, 6, 6), (1, 3, 3)]


def test_a_table_and_what_was_aimed_at(capsys, monkeypatch):
    def one_cell(_cells, seed, *, quick):
        yield measure(Cell(256, 8, 4), seed, quick=quick)

    monkeypatch.setattr("p2pllm.bench.report.measure_all", one_cell)
    assert bench_scheduling(as_json=False, plot=None, quick=True, max_peers=256, seed=0) == 0
    *_, row, summary, phase1, phase2 = capsys.readouterr().out.splitlines()
    assert row.split()[:3] == ["256", "8", "4"]
    assert summary == "2 of 2 plans (100.0%) proven optimal, widest gap 0 stages"
    assert re.fullmatch(r"Phase 1, ms, 256 peers, 8 types, 4 regions: [\d.]+, aim 8.55(: missed)?", phase1)
    assert re.fullmatch(r"Phase 2, ms, 256 peers, 8 types, 4 regions: [\d.]+, aim 1(: missed)?", phase2)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("times.jpeg", "of no known format: end it in .pdf, .png, .svg"),
        ("nowhere/times.png", "there is no folder"),
    ],
)
def test_a_figure_that_cannot_be_drawn_is_refused_at_once(tmp_path, name, says):
    with pytest.raises(P2PLLMError, match=says):
        bench_scheduling(as_json=True, plot=tmp_path / name, quick=True, max_peers=4, seed=0)


def test_nothing_to_measure(capsys):
    assert main(["bench", "scheduling", "--max-peers", "3"]) == 2
    assert "--max-peers 3 leaves nothing to measure" in capsys.readouterr().err


def test_without_matplotlib(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "scheduling", "--plot", str(tmp_path / "times.png")]) == 1
    assert capsys.readouterr().err == (
        "p2pllm: error: --plot draws with matplotlib: pip install 'p2pllm[plots]'\n"
    )
