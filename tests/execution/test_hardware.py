"""What the machine is said to be able to do."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from p2pllm.errors import UsageError
from p2pllm.execution import choose_device, default_dtype, default_threads, hardware, probe


def test_probe_of_the_cpu() -> None:
    found = probe("cpu", threads=1)
    assert found.name
    assert 0 < found.memory_bytes <= psutil.virtual_memory().total
    assert 0 < found.flops < float("inf")
    assert 0 < found.bandwidth < float("inf")


def test_memory_stays_within_the_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(hardware, "_CGROUP_LIMITS", (tmp_path / "absent", limit))
    own = psutil.Process().memory_info().rss
    limit.write_text(f"{own + (1 << 28)}\n")
    assert hardware._memory("cpu") <= (1 << 28) + (1 << 24)
    limit.write_text("max\n")
    assert 0 < hardware._memory("cpu") <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("fpu avx512_bf16 sse", "bfloat16"),
        ("fpu amx_bf16", "bfloat16"),
        ("fpu avx2 avx512f", "float32"),
        ("", "float32"),
    ],
)
def test_dtype_that_a_cpu_is_good_at(
    flags: str, dtype: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: {flags}\nbugs\t: bf16\n")
    monkeypatch.setattr(hardware, "_CPU_INFO", info)
    assert default_dtype("cpu") == dtype
    assert hardware._name("cpu") == "Some CPU"


def test_dtype_of_gpus() -> None:
    assert default_dtype("cuda:1") == "bfloat16"
    assert default_dtype("mps") == "float16"


def test_threads_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert [default_threads(peers) for peers in (0, 1, 3, 8, 9)] == [8, 8, 2, 1, 1]


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_device(None) == "cpu"
    with pytest.raises(UsageError, match="--device cuda: this machine has cpu"):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device(None) == "cuda:0"
    assert choose_device("cuda") == "cuda:0"
    assert choose_device("cuda:1") == "cuda:1"
    assert choose_device("cpu") == "cpu"
    with pytest.raises(UsageError, match="cuda:0, cuda:1, cpu"):
        choose_device("cuda:2")
