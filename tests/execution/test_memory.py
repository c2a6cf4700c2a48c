"""Loading layers holds little more than the layers and a parameter, and dropping them gives it back."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

MEASURE = """
import json, sys
from pathlib import Path
import torch
from p2pllm.execution import open_checkpoint
from p2pllm.execution.hardware import return_memory
from p2pllm.execution.loader import Loader

def resident(what="VmRSS"):
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[what].split()[0]) << 10

torch.set_num_threads(1)  # as the engine does for who reads
loader = Loader(open_checkpoint("embedded"), dtype=sys.argv[1], device="cpu", quant=sys.argv[2])
loader.load(3, 4)  # imports, self-check, thread pools
return_memory()
before, held = resident(), loader.stage.weight_bytes
Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
loader.load(10, 20)
found = {"weights": loader.stage.weight_bytes - held, "peak": resident("VmHWM") - before}
return_memory()  # as the engine does then
found["after"] = resident() - before
loader.stage.retain({3})
return_memory()
print(json.dumps(found | {"dropped": resident() - before}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the peak")
@pytest.mark.parametrize(
    ("dtype", "quant", "bytes_a_weight"),
    [("float32", "none", 4), ("bfloat16", "none", 2), ("bfloat16", "int8", 1), ("bfloat16", "int4", 0.625)],
)
def test_a_stage_in_mid_model_takes_its_own_bytes(dtype: str, quant: str, bytes_a_weight: float) -> None:
    """Ten layers of 3.5 million weights, of a model whose embedding alone has 28 million."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, dtype, quant], capture_output=True, text=True, check=True, timeout=100
    )
    found = json.loads(done.stdout)
    added = 10 * 3_540_096 * bytes_a_weight
    assert found["weights"] == pytest.approx(added, rel=0.02)
    assert found["after"] < added + (16 << 20)
    assert found["peak"] < 1.2 * added + (32 << 20)
    assert found["dropped"] < 16 << 20
