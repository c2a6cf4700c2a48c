"""Loading a slice never holds more than the slice and a parameter."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

MEASURE = """
import json
import psutil
from p2pllm.execution import open_checkpoint
from p2pllm.execution.loader import load_stage

def resident():
    return psutil.Process().memory_info().rss

checkpoint = open_checkpoint("embedded")
warm = load_stage(checkpoint, 3, 4, dtype="float32", device="cpu")  # imports, self-check, thread pools
before = resident()
peak = before
def watch(done, total):
    global peak
    peak = max(peak, resident())
stage = load_stage(checkpoint, 10, 20, dtype="float32", device="cpu", progress=watch)
print(json.dumps({"weights": stage.weight_bytes, "peak": peak - before, "after": resident() - before}))
"""


@pytest.mark.slow
def test_a_stage_in_mid_model_takes_its_own_bytes() -> None:
    """Ten layers of 14 MB, of a model of 538 MB whose embedding alone has 113 MB."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True, timeout=100
    )
    found = json.loads(done.stdout)
    assert found["weights"] == 10 * 14_160_384
    assert found["after"] < found["weights"] + (16 << 20)
    assert found["peak"] < found["weights"] + (24 << 20)
