"""What the machine is said to be able to do."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from p2pllm.errors import UsageError
from p2pllm.execution import choose_device, default_dtype, default_threads, hardware, probe
from p2pllm.execution.measured import MAX_AGE_S, MAX_KINDS, recall, remember


def test_probe_of_the_cpu() -> None:
    found = probe("cpu", threads=1)
    assert found.name
    assert 0 < found.memory_bytes <= psutil.virtual_memory().total
    assert 0 < found.flops < float("inf")
    assert 0 < found.bandwidth < float("inf")


def test_speed_is_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured: list[str] = []

    def measure(device: str, *_: object) -> float:
        measured.append(device)
        return 7e9

    monkeypatch.setattr(hardware, "_measure_flops", measure)
    monkeypatch.setattr(hardware, "_measure_bandwidth", measure)
    clock = [1e9]
    monkeypatch.setattr(hardware.time, "time", lambda: clock[0])
    path = tmp_path / "hardware.json"

    def times(threads: int = 1) -> int:
        before = len(measured)
        assert probe("cpu", threads, path).flops == 7e9
        return (len(measured) - before) // 2

    assert [times(), times(), times(threads=2), times()] == [1, 0, 1, 0]
    clock[0] += MAX_AGE_S + 1
    assert [times(), times()] == [1, 0]
    clock[0] -= 10  # a clock that was set back
    assert times() == 1
    monkeypatch.setattr(hardware.os, "cpu_count", lambda: 77)
    assert [times(), times()] == [1, 0]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[]",
        b'{"a": 1}',
        b'{"a": [1, 2]}',
        b'{"a": [0, 1, 2]}',
        b'{"a": [1, NaN, 2]}',
        b"[" * 9999,
    ],
)
def test_files_that_make_no_sense(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    path.write_bytes(content)
    assert recall(path, "a", 10.0) is None
    remember(path, "a", 1.0, 2.0, 5.0)
    assert recall(path, "a", 10.0) == (1.0, 2.0)


def test_a_file_knows_so_many_machines(tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    for number in range(MAX_KINDS + 1):
        remember(path, str(number), 1.0, 2.0, 100.0 + number)
    assert [recall(path, kind, 200.0) is None for kind in ("0", "1", str(MAX_KINDS))] == [True, False, False]
    assert [entry.name for entry in tmp_path.iterdir()] == ["hardware.json"]
    remember(tmp_path / "absent" / "hardware.json", "a", 1.0, 2.0, 5.0)  # a disk that does not take it


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
    for absent in ("cuda", "cuda:0", "mps", "gpu", ""):
        with pytest.raises(UsageError, match=f"--device {absent}: this machine has cpu"):
            choose_device(absent)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device(None) == "cuda:0"
    assert choose_device("cuda") == "cuda:0"
    assert choose_device("cuda:1") == "cuda:1"
    assert choose_device("cpu") == "cpu"
    with pytest.raises(UsageError, match="cuda:0, cuda:1, cpu"):
        choose_device("cuda:2")
