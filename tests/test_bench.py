"""``bench``: what it prints and draws, not how fast anything is."""

from __future__ import annotations

import json
import random
import re
import sys

import pytest
from PIL import Image
from support.bodies import SWARM, metrics_body

from p2pllm.bench import bench_dht, bench_scheduling
from p2pllm.bench.dht import Row, delays
from p2pllm.bench.hostile import VICES, HostileNode
from p2pllm.bench.samples import Samples
from p2pllm.bench.scheduling import Cell, measure
from p2pllm.bench.spread import Spread
from p2pllm.cli import main
from p2pllm.dht import DhtNode
from p2pllm.errors import P2PLLMError
from p2pllm.identity import Identity
from p2pllm.records import directory_key, seal


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


# bench dht


def test_a_swarm_of_which_a_quarter_dies(capsys, monkeypatch):
    for constant, value in (("WARM_UP_S", 1.0), ("JOINS", 1), ("SPACING_S", 0.05)):
        monkeypatch.setattr(f"p2pllm.bench.dht.{constant}", value)
    arguments = "bench dht --peers 6 --seconds 4 --scenarios killed25 --processes 1 --insecure-links --json"
    assert main(arguments.split()) == 0
    out, err = capsys.readouterr()
    printed = json.loads(out)
    (row,) = printed["rows"]
    assert "6 killed25" in err
    assert (row["peers"], row["scenario"], printed["encrypted"]) == (6, "killed25", False)
    # Four are left, each of which should be in three views whenever somebody looks.
    assert row["looked_records"] % 12 == 0
    assert 0 <= row["missing_records"] <= row["looked_records"] > 0
    for figure in ("age_s", "event_s", "publish_ms"):
        assert 0 < row[figure]["median"] <= row[figure]["p99"]
    assert row["gone_s"] is None  # it ends before anybody can tell that they are dead
    assert 0 < row["join_s"] < 30
    assert 0 <= row["link_kb_per_s"] < row["kb_per_s"]
    assert min(row["kb_sent_per_s"], row["datagrams_per_s"], row["cpu_percent"], row["start_s"]) > 0


def test_delays_worked_by_hand():
    """a changes at 10.0 and 11.0; b sees only the second one, at 11.5, and c none before the end at 14."""
    here = Samples(members=2, seconds=4.0, ended=14.0, events=[("a", 1, 10.0), ("a", 2, 11.0)])
    here.sightings = {"a": [("a", 1, 10.0), ("a", 2, 11.0)], "b": [("a", 2, 11.5)]}
    there = Samples(members=1, seconds=4.0, ended=13.9, sightings={"c": [("b", 7, 12.0)]})
    assert delays([here, there]) == [1.5, 0.5, 4.0, 3.0]


def test_spread_of_a_hundred():
    assert Spread.of(range(1, 101)) == Spread(50.5, 99)
    assert Spread.of([0.002], scale=1e3) == Spread(2.0, 2.0)


def test_a_table_of_swarms_and_what_was_aimed_at(capsys, monkeypatch):
    rates = {"kb_per_s": 9.5, "kb_sent_per_s": 9.0, "link_kb_per_s": 1.0, "datagrams_per_s": 30.0}
    others = {"cpu_percent": 0.25, "missing_records": 3, "looked_records": 4032}
    times = {"publish_ms": Spread(3, 4), "join_s": None, "start_s": 1.0, "gone_s": None}
    row = Row(peers=64, scenario="idle", age_s=Spread(1, 2), event_s=None, **times, **rates, **others)
    monkeypatch.setattr("p2pllm.bench.dht.measure_all", lambda *_: iter([row]))
    options = {"peers": 64, "scenarios": ("idle",), "seconds": 1.0, "processes": 1, "seed": 0}
    assert bench_dht(as_json=False, encrypted=True, **options) == 0
    *_, header, line, received, processor = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["peers", "scenario"]
    assert " ".join(line.split()) == "64 idle 1.00 2.00 - - 3.0 4.0 - - 9.5 9.0 1.0 30.0 0.25 3/4032"
    assert received == "received, kB/s, 64 peers, idle: 9.5, aim 8: missed"
    assert processor == "CPU, % of a core, 64 peers, idle: 0.25, aim 0.5"


@pytest.mark.parametrize("vice", VICES)
async def test_a_hostile_node_does_harm(vice):
    """Whoever knows no other node believes that it stores, and never reads what is true now."""
    honest, liar = Identity.from_seed(bytes(32)), Identity.from_seed(bytes([1]) * 32)
    key = directory_key(SWARM, bytes(20), 0)
    hostile = HostileNode(liar, vice, random.Random(0))
    founder, writer, reader = (DhtNode(Identity.generate()) for _ in range(3))
    try:
        for one in (founder, writer, reader):
            await one.start(["127.0.0.1"], 0)
        await hostile.start(("127.0.0.1", founder.port))
        await founder.close()
        for one in (writer, reader):
            assert await one.bootstrap([hostile.address]) == 1
        for seq in (1, 2):
            raw = seal(honest, metrics_body(), swarm=SWARM, seq=seq, ttl=5.0)
            assert await writer.put(key, raw) == 2  # itself, and the liar
        found = [held.record.seq for held in await reader.read(key)]
        assert found == ([1] if vice == "stale" else [])
    finally:
        await hostile.stop()
        for one in (founder, writer, reader):
            await one.close()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--scenarios", "healthy,storm"], "'storm' is no scenario: choose from healthy, idle"),
        (["--peers", "3"], "--peers 3 is too few"),
        (["--peers", "6", "--processes", "4"], "2 for each of the --processes"),
    ],
)
def test_swarms_that_cannot_be(arguments, says, capsys):
    with pytest.raises(SystemExit, match="2"):
        raise SystemExit(main(["bench", "dht", *arguments]))
    assert says in capsys.readouterr().err
