"""Loading layers holds little more than the layers and a few parameters, and dropping them gives it back."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

MEASURE = """
import json
import psutil
from p2pllm.execution import open_checkpoint
from p2pllm.execution.hardware import return_memory
from p2pllm.execution.loader import Loader

def resident():
    return psutil.Process().memory_info().rss

checkpoint = open_checkpoint("embedded")
loader = Loader(checkpoint, dtype="float32", device="cpu")
loader.load(3, 4)  # imports, self-check, thread pools
before = resident()
peak = before
def watch(done, total):
    global peak
    peak = max(peak, resident())
loader.load(10, 20, watch)
return_memory()  # as the engine does then
found = {"weights": loader.stage.weight_bytes, "peak": peak - before, "after": resident() - before}
loader.stage.retain({3})
return_memory()
print(json.dumps(found | {"dropped": resident() - before}))
"""


@pytest.mark.slow
def test_a_stage_in_mid_model_takes_its_own_bytes() -> None:
    """Ten layers of 14 MB, of a model of 538 MB whose embedding alone has 113 MB."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True, timeout=100
    )
    found = json.loads(done.stdout)
    added = 10 * 14_160_384
    assert found["weights"] == added + 14_160_384
    assert found["after"] < added + (16 << 20)
    assert found["peak"] < 1.2 * added + (64 << 20)
    assert found["dropped"] < 16 << 20
