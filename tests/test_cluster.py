"""Cluster files: the example of the documentation, what overrides what, and every way to get one wrong."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pllm.cluster import Cluster, parse_cluster, read_cluster
from p2pllm.errors import ClusterError
from p2pllm.scheduling import Capacity, Holder, Request, Roofline, Slice

GIB = 2**30

EXAMPLE: dict[str, Any] = {
    "model": {
        "name": "Qwen3-32B",
        "layers": 64,
        "hidden": 5120,
        "layer_bytes": 975200000,
        "embed_bytes": 1560000000,
        "head_bytes": 1560000000,
        "kv_bytes_per_token_layer": 4096,
        "layer_params": 487600000,
    },
    "peers": [
        {
            "id": "a",
            "region": "us",
            "memory_bytes": 34359738368,
            "flops": 2.1e14,
            "bandwidth": 1.79e12,
            "capacity": 22,
            "tau_s": 0.02,
        },
        {"id": "b", "region": "us", "memory_bytes": 34359738368, "flops": 2.1e14, "bandwidth": 1.79e12},
        {"id": "c", "region": "eu", "capacity": 100, "tau_s": 0.05},
        {"id": "d", "region": "eu", "capacity": 0, "tau_s": 0.05},
    ],
    "network": {"same_region_s": 0.001, "cross_region_s": 0.05, "pairs": [["a", "b", 0.002]]},
    "options": {"weights_ratio": 0.65, "r_rtt_s": 0.01, "t_comp_s": 0.05, "entry": "a"},
}

Change = Callable[[dict[str, Any]], object]


def cluster(change: Change | None = None) -> Cluster:
    """The example, changed in place first."""
    file = copy.deepcopy(EXAMPLE)
    if change is not None:
        change(file)
    return parse_cluster(json.dumps(file))


def small(*peers: dict[str, Any], **rest: Any) -> Cluster:
    """Twelve layers of a model of no known size."""
    return parse_cluster(json.dumps({"model": {"layers": 12}, "peers": peers, **rest}))


def test_the_example() -> None:
    read = cluster()
    assert (read.model, read.layers, read.entry, read.expected_tokens) == ("Qwen3-32B", 64, "a", 128)
    assert (read.goal.objective, read.goal.r_rtt_s, read.goal.t_comp_s) == ("linear", 0.01, 0.05)
    a, b, c, d = read.offers
    assert [offer.region for offer in read.offers] == ["us", "us", "eu", "eu"]
    # 0.65 of 32 GiB are 22.33 GB: 22.9 layers, 21.3 beside embedding or head, 19.7 beside both.
    assert b.capacity == Capacity(middle=22, first=21, last=21, both=19)
    assert b.kv_bytes == pytest.approx(0.35 * 32 * GIB - 64 * 2**20, abs=1)
    assert a.capacity == Capacity.same(22)
    assert c.capacity == Capacity.same(64)  # no more than there are
    assert d.capacity == Capacity.same(0)
    assert read.network("a", "b") == read.network("b", "a") == 0.002
    assert read.network("c", "d") == 0.001
    assert read.network("a", "c") == 0.05
    assert read.today is None


def test_speed_by_roofline_and_by_tau() -> None:
    read = cluster()
    a, b, c, _ = read.offers
    gpu, request = Roofline(2.1e14, 1.79e12), Request(prompt=512, tokens=128)
    mix = gpu.layer_s(975.2e6, 487.6e6, request, "mix")
    head = gpu.pass_s(1.56e9, 0.78e9)
    assert (b.layer_s, b.head_s) == pytest.approx((mix, head))
    # Where a file has both, Phase 1 goes by the roofline: nobody knows yet how long the slice will be.
    assert (a.layer_s, a.head_s) == pytest.approx((mix, head))
    assert (c.layer_s, c.head_s) == (0.05 / 64, 0.0)
    # Phase 2 decodes, and takes tau for the slice as it came out.
    assert read.holder(Slice("a", 10, 20)) == Holder("a", 10, 20, 0.002)
    assert read.holder(Slice("c", 0, 64)) == Holder("c", 0, 64, 0.05 / 64)
    decode = read.holder(Slice("b", 44, 64))
    assert (decode.layer_s, decode.head_s) == pytest.approx((gpu.pass_s(975.2e6, 487.6e6), head))


def test_the_phase_and_the_expected_request_decide_how_fast_a_peer_counts() -> None:
    gpu = Roofline(2.1e14, 1.79e12)

    def layer_s(**options: Any) -> float:
        return cluster(lambda file: file["options"].update(options)).offers[1].layer_s

    assert layer_s(phase="decode") == pytest.approx(gpu.pass_s(975.2e6, 487.6e6))
    prompt = gpu.pass_s(975.2e6, 487.6e6, 1000)
    assert layer_s(phase="prefill", expected_prompt=1000) == pytest.approx(prompt / 1000)
    mix = gpu.pass_s(975.2e6, 487.6e6) + prompt / 50
    assert layer_s(expected_prompt=1000, expected_tokens=50) == pytest.approx(mix)


def test_two_bytes_are_a_parameter_unless_the_file_says_otherwise() -> None:
    plain = cluster(lambda file: file["model"].pop("layer_params"))
    assert plain.offers[1].layer_s == pytest.approx(cluster().offers[1].layer_s)
    eight_bit = cluster(lambda file: file["model"].update(layer_params=975200000))
    assert eight_bit.offers[1].layer_s > plain.offers[1].layer_s


def test_a_kv_reserve_instead_of_a_ratio() -> None:
    def reserve(file: dict[str, Any]) -> None:
        del file["options"]["weights_ratio"]
        file["options"]["kv_reserve_tokens"] = 10_000

    # (32 GiB - 64 MiB) / (975.2 MB + 40.96 MB) are 33.7 layers.
    assert cluster(reserve).offers[1].capacity.middle == 33
    assert cluster(reserve).offers[1].kv_bytes == 33 * 10_000 * 4096


def test_a_tied_model_needs_its_embedding_twice_only_across_stages() -> None:
    def tie(file: dict[str, Any]) -> None:
        del file["model"]["head_bytes"]
        file["model"]["tied"] = True

    assert cluster(tie).offers[1].capacity == Capacity(middle=22, first=21, last=21, both=21)


def test_peers_without_any_speed_are_equal() -> None:
    read = small({"id": "a", "capacity": 5}, {"id": "b", "capacity": 9})
    assert read.offers[0].layer_s == read.offers[1].layer_s > 0
    assert read.holder(Slice("a", 0, 5)).layer_s == read.holder(Slice("b", 5, 12)).layer_s > 0


def test_a_tau_of_nothing_is_no_time_in_a_chain_and_a_speed_in_a_placement() -> None:
    read = small({"id": "a", "capacity": 5, "tau_s": 0}, {"id": "b", "capacity": 0, "tau_s": 0.1})
    assert read.holder(Slice("a", 0, 5)).layer_s == 0.0
    assert all(offer.layer_s > 0 for offer in read.offers)


def test_pairs_hold_both_ways_unless_both_are_given() -> None:
    peers = [{"id": name, "capacity": 3, "region": name} for name in "abc"]
    read = small(*peers, network={"pairs": [["a", "b", 0.1], ["b", "a", 0.2], ["b", "c", 0.3]]})
    assert (read.network("a", "b"), read.network("b", "a")) == (0.1, 0.2)
    assert (read.network("b", "c"), read.network("c", "b")) == (0.3, 0.3)
    assert read.network("a", "c") is None


def test_regions_that_are_not_given_come_from_the_pairs() -> None:
    peers = [{"id": name, "capacity": 3} for name in "abcd"]
    peers[2]["region"] = "eu"
    read = small(*peers, network={"pairs": [["a", "b", 0.01], ["c", "d", 0.002], ["b", "c", 0.08]]})
    a, b, c, d = (offer.region for offer in read.offers)
    assert a == b != c == d == "eu"


def test_without_regions_and_pairs_all_peers_are_together() -> None:
    read = small({"id": "a", "capacity": 5}, {"id": "b", "capacity": 9}, network={"same_region_s": 0.004})
    assert read.offers[0].region == read.offers[1].region
    assert read.network("a", "b") == 0.004


def test_bytes_may_be_written_with_an_exponent() -> None:
    read = cluster(lambda file: file["peers"][1].update(memory_bytes=34.359738368e9))
    assert read.offers == cluster().offers


def test_today_is_the_output_of_an_earlier_plan() -> None:
    stages = [{"peer": "a", "start": 0, "end": 20}, {"peer": "gone", "start": 20, "end": 64}]
    printed = {
        "k": 1,
        "pipelines": [{"region": "us", "stages": stages}],
        "spares": [{"peer": "c", "start": 3, "end": 9}],
        "elapsed_ms": {"phase1": 1.0, "phase2": 1.0},
    }
    today = cluster(lambda file: file.update(today=printed)).today
    assert today is not None
    assert today.slices == (Slice("a", 0, 20), Slice("gone", 20, 64), Slice("c", 3, 9))
    assert today.pipelines[0].regions == ("us",)


def peer(number: int, **fields: Any) -> Change:
    return lambda file: file["peers"][number].update(fields)


def without(number: int, *fields: str) -> Change:
    return lambda file: [file["peers"][number].pop(field) for field in fields]


def pairs(*added: list[Any]) -> Change:
    return lambda file: file["network"]["pairs"].extend(added)


def part(name: str, **fields: Any) -> Change:
    return lambda file: file[name].update(fields)


def today(*bounds: tuple[int, int]) -> Change:
    stages = [{"peer": "a", "start": start, "end": end} for start, end in bounds]
    return lambda file: file.update(today={"pipelines": [{"region": "us", "stages": stages}]})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (peer(1, tau_s=-0.1), "peers[1].tau_s: must be greater than or equal to 0, got -0.1"),
        (peer(1, tau_s=float("nan")), "peers[1].tau_s: must be a finite number, got nan"),
        (peer(1, tau_s=float("inf")), "peers[1].tau_s: must be a finite number, got inf"),
        (peer(1, capacity=-1), "peers[1].capacity: must be greater than or equal to 0, got -1"),
        (peer(1, capacity=2.5), "peers[1].capacity: must be a valid integer, got 2.5"),
        (peer(1, capacity=float("nan")), "peers[1].capacity: must be a valid integer, got nan"),
        (peer(1, capacity=True), "peers[1].capacity: must be a valid integer"),
        (peer(1, capacity="22"), "peers[1].capacity: must be a valid integer"),
        (peer(1, memory_bytes=-5), "peers[1].memory_bytes: must be greater than or equal to 0, got -5"),
        (peer(1, memory_bytes=float("inf")), "peers[1].memory_bytes: must be a valid integer, got inf"),
        (peer(1, flops=0), "peers[1].flops: must be greater than or equal to 1, got 0"),
        (peer(1, bandwidth=-1.0), "peers[1].bandwidth: must be greater than or equal to 1, got -1"),
        (peer(1, colour="red"), "peers[1]: unknown key 'colour'"),
        (peer(1, id="a"), "peers: 2 of them have the id 'a'"),
        (peer(1, id=""), "peers[1].id: must not be empty"),
        (peer(1, id="\n"), "peers[1].id: must be printable text"),
        (peer(1, id=7), "peers[1].id: must be a valid string"),
        (without(1, "id"), "peers[1].id missing"),
        (without(1, "memory_bytes"), "peers[1]: memory_bytes or capacity missing"),
        (without(1, "flops"), "peers[1]: flops and bandwidth come together"),
        (without(1, "flops", "bandwidth"), "peers[1]: tau_s, or flops and bandwidth, missing"),
        (lambda file: file.update(peers=[]), "peers: must not be empty"),
        (lambda file: file.pop("peers"), "peers missing"),
        (lambda file: file.update(peer=[]), "unknown key 'peer'"),
        (part("model", layers=0), "model.layers: must be greater than or equal to 1, got 0"),
        (part("model", layers=5000), "model.layers: must be less than or equal to 1024, got 5000"),
        (part("model", layer_bytes=0), "model.layer_bytes: must be greater than or equal to 1, got 0"),
        (lambda file: file["model"].pop("layers"), "model.layers missing"),
        (lambda file: file["model"].pop("head_bytes"), "model: head_bytes missing"),
        (lambda file: file["model"].pop("layer_bytes"), "model: layer_bytes missing"),
        (part("network", same_region_s=-1), "network.same_region_s: must be greater than or equal to 0"),
        (part("network", cross_region_s=float("nan")), "network.cross_region_s: must be a finite number"),
        (pairs(["a", "c", -0.1]), "network.pairs[1][2]: must be greater than or equal to 0, got -0.1"),
        (pairs(["a", "c", float("inf")]), "network.pairs[1][2]: must be a finite number"),
        (pairs(["a", "nobody", 0.1]), "network.pairs: no peer has the id 'nobody'"),
        (pairs(["c", "c", 0.1]), "network: pairs has 'c' with itself"),
        (pairs(["a", "b", 0.1]), "network: pairs has 'a' to 'b' 2 times"),
        (pairs(["a", "b"]), "network.pairs[1][2] missing"),
        (part("options", entry="nobody"), "options.entry: no peer has the id 'nobody'"),
        (part("options", weights_ratio=0.0), "options.weights_ratio: must be greater than 0, got 0"),
        (part("options", weights_ratio=1.5), "options.weights_ratio: must be less than or equal to 1"),
        (part("options", kv_reserve_tokens=9), "options: weights_ratio and kv_reserve_tokens exclude each"),
        (part("options", r_rtt_s=-1.0), "options.r_rtt_s: must be greater than or equal to 0, got -1"),
        (part("options", t_comp_s=0), "options.t_comp_s: must be greater than or equal to"),
        (part("options", objective="fast"), "options.objective: must be 'linear', 'ratio' or 'throughput'"),
        (part("options", phase="both"), "options.phase: must be 'mix', 'decode' or 'prefill'"),
        (part("options", alpha=-1.0), "options.alpha: must be greater than or equal to 0, got -1"),
        (part("options", expected_tokens=0), "options.expected_tokens: must be greater than or equal to 1"),
        (today((0, 65)), "today: 'a' cannot have layers 0:65 of 64"),
        (today((5, 5)), "today: 'a' cannot have layers 5:5 of 64"),
        (today((0, 5), (5, 64)), "today: 'a' has 2 slices"),
        (today((-1, 5)), "today.pipelines[0].stages[0].start: must be greater than or equal to 0"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(change: Change, says: str) -> None:
    with pytest.raises(ClusterError) as caught:
        cluster(change)
    said = str(caught.value)
    assert said.startswith(says)
    assert "\n" not in said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "not JSON: "),
        (b"{", "not JSON: "),
        (b"\xff\xfe", "not JSON: "),
        (b"[" * 100_000, "not JSON: "),
        (b'{"model": 1e999}', "model: "),
        (b"[]", "must be an object"),
        (b"null", "must be an object"),
    ],
)
def test_text_that_is_no_cluster_file(text: bytes, says: str) -> None:
    with pytest.raises(ClusterError) as caught:
        parse_cluster(text)
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterError, match=r"none\.json: No such file"):
        read_cluster(tmp_path / "none.json")
    with pytest.raises(ClusterError, match="directory"):
        read_cluster(tmp_path)
    path = tmp_path / "cluster.json"
    path.write_text("{}")
    with pytest.raises(ClusterError, match=r"cluster\.json: model missing"):
        read_cluster(path)
    monkeypatch.setattr("p2pllm.cluster.cluster.MAX_FILE", 100)
    path.write_text(json.dumps(EXAMPLE))
    with pytest.raises(ClusterError, match=r"cluster\.json: more than"):
        read_cluster(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=5), values, max_size=3),
    max_leaves=6,
)


@given(st.data())
def test_whatever_is_changed_there_is_a_cluster_or_a_clear_error(data: st.DataObject) -> None:
    file = copy.deepcopy(EXAMPLE)
    place: Any = file
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(json_values)
    said, read = "", None
    try:
        read = parse_cluster(json.dumps(file))
    except ClusterError as error:
        said = str(error)
    assert "\n" not in said
    assert said or (read and read.layers >= 1 and read.offers)
