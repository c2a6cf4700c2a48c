"""The ``plan`` command: known clusters in, the right plan out, as JSON and for people."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from p2pllm.cluster import parse_cluster
from p2pllm.errors import ModelError
from p2pllm.plan import certify, make_plan, outcome_json, print_outcome

GIB = 2**30

# A model of which half of 80, 40, 32 and 24 GB hold 13, 6, 5 and 4 layers, and one less or two at the ends.
LARGE = {
    "layer_bytes": 3_211_591_680,
    "embed_bytes": 1_158_266_880,
    "head_bytes": 1_158_266_880,
    "kv_bytes_per_token_layer": 4096,
}
TFLOPS = {80: 312.0, 40: 312.0, 32: 165.0, 24: 82.6}
QWEN3_32B = {
    "layer_bytes": 975_200_000,
    "embed_bytes": 1_560_000_000,
    "head_bytes": 1_560_000_000,
    "kv_bytes_per_token_layer": 4096,
}


def cluster_file(layers: int, peers: list[dict[str, Any]], **rest: Any) -> dict[str, Any]:
    network = {"same_region_s": 0.001, "cross_region_s": 0.05}
    return {"model": {"layers": layers}, "peers": peers, "network": network} | rest


def machines(layers: int, gigabytes: list[int], model: dict[str, int], ratio: float) -> dict[str, Any]:
    """Peers with so much memory each, as fast in prefill as their arithmetic is."""
    peers = [
        {
            "id": f"p{number}",
            "region": "home",
            "memory_bytes": size * GIB,
            "flops": TFLOPS.get(size, 100.0) * 1e12,
            "bandwidth": 1e15,
        }
        for number, size in enumerate(gigabytes)
    ]
    options = {"weights_ratio": ratio, "phase": "prefill", "r_rtt_s": 0.0}
    return cluster_file(layers, peers, model={"layers": layers} | model, options=options)


def peers(*capacities: int, region: str = "home", tau_s: float = 0.01) -> list[dict[str, Any]]:
    return [
        {"id": f"{region}{number}", "region": region, "capacity": capacity, "tau_s": tau_s}
        for number, capacity in enumerate(capacities)
    ]


def planned(file: dict[str, Any]) -> dict[str, Any]:
    cluster = parse_cluster(json.dumps(file))
    made = outcome_json(cluster, make_plan(cluster))
    json.dumps(made, allow_nan=False)
    return made


def lengths(made: dict[str, Any]) -> list[list[int]]:
    """Layers of each stage of each pipeline, all sorted."""
    return sorted(
        sorted(stage["end"] - stage["start"] for stage in pipeline["stages"])
        for pipeline in made["pipelines"]
    )


def test_known_placements() -> None:
    assert lengths(planned(machines(36, [80] * 6, LARGE, 0.5))) == [[12, 12, 12]] * 2
    assert lengths(planned(machines(22, [80, 80, 40, 40, 24, 24], LARGE, 0.5))) == [[3, 6, 13]] * 2
    assert lengths(planned(machines(6, [80, 24, 24], LARGE, 0.5))) == [[3, 3], [6]]
    assert lengths(planned(machines(5, [80], LARGE, 0.5))) == [[5]]


def test_what_fits_depends_on_the_place_and_is_respected_there() -> None:
    """80 and 16 GB are a replica, to the last layer: 55 with the one end and 9 with the other."""
    gigabytes = [32, 32, 20, 16, 80, 48, 16]
    made = planned(machines(64, gigabytes, QWEN3_32B, 0.65))
    assert (made["k"], made["stages"], made["stages_bound"]) == (2, 5, 5)
    # Layers in the middle and at an end.
    rooms = {32: (22, 21), 20: (14, 12), 16: (11, 9), 80: (57, 55), 48: (34, 32)}
    sizes = {f"p{number}": size for number, size in enumerate(gigabytes)}
    for pipeline in made["pipelines"]:
        reached = 0
        for stage in pipeline["stages"]:
            assert stage["start"] == reached
            reached = stage["end"]
            at_an_end = stage["start"] == 0 or stage["end"] == 64
            assert stage["end"] - stage["start"] <= rooms[sizes[stage["peer"]]][at_an_end]
        assert reached == 64


def test_the_object_is_what_the_documentation_says() -> None:
    made = planned(
        cluster_file(4, peers(2, 2, 2), options={"r_rtt_s": 0.01, "t_comp_s": 0.05, "entry": "home0"})
    )
    elapsed = made.pop("elapsed_ms")
    assert set(elapsed) == {"phase1", "phase2"}
    assert min(elapsed.values()) > 0
    (pipeline,) = made.pop("pipelines")
    assert pipeline["region"] == "home"
    assert [(stage["start"], stage["end"]) for stage in pipeline["stages"]] == [(0, 2), (2, 4)]
    (spare,) = made.pop("spares")
    chain = made.pop("chain")
    assert {"peer", "start", "end"} == set(spare) == set(chain[0])
    assert [(stage["start"], stage["end"]) for stage in chain] == [(0, 2), (2, 4)]
    # Two peers of 10 ms, and 1 ms there and back.
    assert made.pop("chain_latency_s") == pytest.approx(0.022)
    scores = made.pop("scores")
    # Z = 1 - 2/1 · 0.01/0.05; the ratio is 1 / (0.05 + 2 · 0.01).
    assert scores == pytest.approx({"linear": 0.6, "ratio": 1 / 0.07, "throughput": 1 / 0.022})
    assert made == {
        "k": 1,
        "stages": 2,
        "z": pytest.approx(0.6),
        "candidates": [{"k": 1, "stages": 2, "z": pytest.approx(0.6)}],
        "no_chain": "",
        "crossings": 0,
        "objective": "linear",
        "stages_bound": 2,
        "z_bound": pytest.approx(0.6),
        "r_rtt_s": 0.01,
        "t_comp_s": 0.05,
        "kept": False,
    }


def test_tau_is_of_the_slice_as_it_came_out() -> None:
    fast, slow = peers(4, tau_s=0.030), peers(4, region="far", tau_s=0.090)
    made = planned(cluster_file(6, fast + slow, network={"same_region_s": 0.001, "cross_region_s": 0.002}))
    assert made["chain_latency_s"] == pytest.approx(0.030 + 0.090 + 2 * 0.002)


def test_the_entry_and_the_expected_tokens_choose_the_chain() -> None:
    near, far = peers(4, region="near", tau_s=0.02), peers(4, region="far", tau_s=0.01)
    me = [{"id": "me", "region": "near", "capacity": 0, "tau_s": 0.0}]
    for tokens, chosen in ((1, "near0"), (1000, "far0")):
        made = planned(cluster_file(4, near + far + me, options={"entry": "me", "expected_tokens": tokens}))
        assert [stage["peer"] for stage in made["chain"]] == [chosen]
        # The way from and to the entry chooses, but is not part of the ring.
        assert made["chain_latency_s"] == pytest.approx(0.02 if chosen == "near0" else 0.01)


def test_where_no_region_suffices_the_pipeline_crosses() -> None:
    made = planned(cluster_file(6, peers(4, region="eu") + peers(4, region="us")))
    (pipeline,) = made["pipelines"]
    assert pipeline["region"].split("+") == sorted(["eu", "us"])
    assert made["crossings"] == 2


def test_peers_that_cannot_reach_each_other_have_a_placement_and_no_chain() -> None:
    made = planned(cluster_file(4, peers(2, 2), network={}))
    assert (made["k"], made["chain"], made["chain_latency_s"]) == (1, [], None)
    assert "reach each other" in made["no_chain"]


def test_the_plan_of_today_stays() -> None:
    file = cluster_file(9, peers(3, 3, 3, 4))
    first = planned(file)
    again = planned(file | {"today": first})
    assert again["kept"]
    assert again["pipelines"] == first["pipelines"]
    assert again["spares"] == first["spares"]


def test_missing_layers_are_counted() -> None:
    with pytest.raises(ModelError, match="3 layers are missing"):
        planned(cluster_file(12, peers(4, 5, 0)))


@pytest.mark.parametrize("objective", ["linear", "ratio", "throughput"])
def test_certificates_have_no_gap_on_small_swarms(objective: str) -> None:
    file = cluster_file(12, peers(7, 5, 4, 8, 3) + peers(6, 6, 12, region="far"))
    cluster = parse_cluster(json.dumps(file | {"options": {"objective": objective}}))
    plan = make_plan(cluster).plan
    certificate = certify(cluster, plan)
    assert certificate is not None
    assert certificate.method == "exhaustive"
    assert (certificate.k, certificate.stages) == (plan.k, plan.stages)
    assert (certificate.gap_k, certificate.gap_stages) == (0, 0)
    if objective == "throughput":
        assert certificate.z is certificate.gap_z is None
    else:
        assert certificate.z == pytest.approx(plan.z)
        assert certificate.gap_z == pytest.approx(0)


def test_a_certificate_tells_how_far_a_plan_is_off() -> None:
    """The plan of today, which stays for want of a 5 % gain, takes a stage more than it must."""
    stages = [{"peer": f"home{n}", "start": 2 * n, "end": 2 * n + 2} for n in range(3)]
    file = cluster_file(
        6,
        peers(2, 2, 2, 4, tau_s=0.01),
        today={"pipelines": [{"region": "home", "stages": stages}]},
        options={"r_rtt_s": 0.001, "t_comp_s": 0.01},
        network={"same_region_s": 0.0},
    )
    for peer in file["peers"]:
        peer["tau_s"] = 0.01 * peer["capacity"]
    cluster = parse_cluster(json.dumps(file))
    plan = make_plan(cluster).plan
    assert (plan.kept, plan.k, plan.stages) == (True, 1, 3)
    certificate = certify(cluster, plan)
    assert certificate is not None
    assert (certificate.stages, certificate.gap_k, certificate.gap_stages) == (2, 0, 1)
    assert certificate.gap_z == pytest.approx(0.1)


def test_there_is_no_certificate_across_regions() -> None:
    cluster = parse_cluster(json.dumps(cluster_file(6, peers(4, region="eu") + peers(4, region="us"))))
    assert certify(cluster, make_plan(cluster).plan) is None


def shown(file: dict[str, Any]) -> str:
    cluster = parse_cluster(json.dumps(file))
    console = Console(file=io.StringIO(), width=120, markup=False, highlight=False)
    print_outcome(console, cluster, make_plan(cluster))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_people_see_peers_regions_layers_and_what_the_figures_mean() -> None:
    name = "[bold red]eu[/]"
    made = shown(cluster_file(4, peers(2, 2, 2, region=name), options={"r_rtt_s": 0.01, "t_comp_s": 0.05}))
    for words in (
        f"{name}0",
        "0:2",
        "2:4",
        "spare",
        "10.0 ms",
        "22.0 ms a token",
        "k = 1",
        "Z = 0.6",
        "45.45 tokens/s",
    ):
        assert words in made
    assert shown(cluster_file(4, peers(2, 2), network={})).count("chain: none, no chain connects") == 1
    crossing = shown(cluster_file(6, peers(4, region="eu") + peers(4, region="us")))
    assert "crosses regions 2 times" in crossing
    file = cluster_file(4, peers(2, 2))
    assert "of today stay" in shown(file | {"today": planned(file)})


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "p2pllm", "plan", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(cluster_file(4, peers(2, 2, 2))))
    result = run(str(path), "--json", "--certify")
    assert result.returncode == 0, result.stderr
    (line,) = result.stdout.splitlines()
    made = json.loads(line)
    assert (made["k"], made["stages"]) == (1, 2)
    assert made["certificate"]["gap_stages"] == 0
    result = run(str(path), "--certify")
    assert result.returncode == 0
    assert "certified (exhaustive)" in result.stdout


@pytest.mark.parametrize(
    ("file", "says"),
    [
        (cluster_file(12, peers(4, 5)), "3 layers are missing"),
        (cluster_file(12, peers(4, -5)), "cluster.json: peers[1].capacity: must be greater"),
    ],
)
def test_failures_are_one_line(file: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(file))
    result = run(str(path))
    assert (result.returncode, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("p2pllm: error: ")
    assert says in line
