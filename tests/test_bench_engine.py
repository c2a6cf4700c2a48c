"""``bench decode`` and ``bench throughput``: what they print and how they count, not how fast anything is."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.models import save_tiny_model

from p2pllm.bench.aims import Aim
from p2pllm.bench.loopback import spans
from p2pllm.bench.spread import Spread
from p2pllm.bench.throughput import Interference, intervals, together_tok_s
from p2pllm.cli import main


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


class ThreePeers:
    """Instead of processes: those are measured by hand, and started in other tests."""

    def __init__(self, *given: Any) -> None:
        self.given = given

    async def decode_tok_s(self, _question: str, tokens: int) -> float:
        return float(tokens)


def test_decode(tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    swarms = []

    @asynccontextmanager
    async def loopback(*given: Any) -> Any:
        swarms.append(ThreePeers(*given))
        yield swarms[-1]

    monkeypatch.setattr("p2pllm.bench.decode.loopback", loopback)
    monkeypatch.setattr("p2pllm.bench.decode.spans", lambda *_: ["0:1", "1:1", "1:2"])
    monkeypatch.setattr("p2pllm.bench.rival.COPY_BYTES", 2**16)
    assert main(["bench", "decode", "--model", tiny, "--tokens", "5", "--rounds", "2", "--json"]) == 0
    out, err = capsys.readouterr()
    printed = json.loads(out)
    found = [(row["dtype"], row["quant"]) for row in printed["rows"]]
    assert found == [("float32", "none"), *(("bfloat16", quant) for quant in ("none", "int8", "int4"))]
    for row, swarm in zip(printed["rows"], swarms, strict=True):
        quantized = [] if row["quant"] == "none" else ["--quant", row["quant"]]
        assert swarm.given == (tiny, ["0:1", "1:1", "1:2"], ["--dtype", row["dtype"], *quantized])
        assert row["three_stage_tok_s"] == 5.0
        # A third of what three stages take longer than one; rounded to microseconds, and speeds to 0.01.
        assert row["hop_ms"] == pytest.approx((1e3 / 5 - 1e3 / row["one_thread_tok_s"]) / 3, rel=0.1)
        assert min(row["generate_tok_s"], row["one_stage_tok_s"]) > 0
        assert row["dtype"] in err
        assert row["perplexity"] > 1
    assert printed["rows"][0]["agreement"] == 1.0
    names = [aim["name"] for aim in printed["aims"]]
    assert names[0] == "float32, one stage, times generate"
    assert printed["aims"][0]["limit"] == 1.6


def test_throughput(tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for constant, value in (("STREAMS", (1, 8)), ("PREFILL_TOKENS", 32), ("LONG_TOKENS", 400)):
        monkeypatch.setattr(f"p2pllm.bench.throughput.{constant}", value)
    arguments = ["bench", "throughput", "--model", tiny, "--tokens", "4", "--rounds", "1", "--json"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    printed = json.loads(out)
    assert [row["streams"] for row in printed["rows"]] == [1, 8]
    for row in printed["rows"]:
        assert row["dtype"] == "float32"
        assert 0 < row["interval_ms"]["median"] <= row["interval_ms"]["p99"]
        assert min(row["tok_s"], row["transformers_tok_s"], row["ttft_s"]) > 0
    assert min(printed["prefill"]["tok_s"], printed["prefill"]["reference_tok_s"]) > 0
    assert printed["interval_p99_ratio_under_prefill"] > 0
    assert len(printed["aims"]) == 4
    assert "float32" in err


@pytest.mark.parametrize("arguments", [["--tokens", "1"], ["--rounds", "0"]])
def test_too_little_to_measure(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "decode", *arguments])


def test_speeds_and_intervals_by_hand() -> None:
    """Five tokens, of which the first is where counting begins, in 0.3 s; each stream has its own gaps."""
    arrivals = [[0.1, 0.2, 0.4], [0.15, 0.35]]
    assert together_tok_s(arrivals) == pytest.approx(4 / 0.3)
    assert intervals(arrivals) == pytest.approx([0.1, 0.2, 0.2])
    assert Interference(alone_ms=Spread(10, 20), beside_ms=Spread(15, 50)).ratio == 2.5


def test_layers_are_dealt_by_what_they_weigh() -> None:
    assert spans(30, 8) == ["0:13", "13:25", "25:30"]
    assert spans(3, 0) == ["0:1", "1:2", "2:3"]


def test_aims() -> None:
    least, most = Aim("speed", 1.5), Aim("hop, ms", 0.25, at_most=True)
    assert least.says(1.5) == "speed: 1.5, aim at least 1.5"
    assert least.says(1.25) == "speed: 1.25, aim at least 1.5: missed"
    assert most.says(0.3) == "hop, ms: 0.3, aim at most 0.25: missed"
    assert most.as_object(0.1) == {"name": "hop, ms", "limit": 0.25, "at_most": True, "measured": 0.1}
