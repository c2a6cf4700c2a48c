"""What this machine can do: devices, memory, speed. Only `choose_device` and `probe` need torch."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from p2pllm.errors import UsageError
from p2pllm.execution.measured import recall, remember
from p2pllm.execution.threads import in_own_thread

if TYPE_CHECKING:
    import torch

__all__ = [
    "Hardware",
    "choose_device",
    "default_dtype",
    "probe",
    "return_host_memory",
    "return_memory",
]


_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_CPU_INFO = Path("/proc/cpuinfo")
_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_PROBE_SECONDS = 0.4
_BANDWIDTH_BYTES = 256 << 20
"""Read at once by the bandwidth probe: more than caches hold."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device as measured: usable memory in bytes, FLOP/s of a matrix product, bytes/s of reading memory."""

    name: str
    memory_bytes: int
    flops: float
    bandwidth: float


def choose_device(wanted: str | None) -> str:
    """``wanted`` if torch has it here ("cpu", "mps", "cuda", "cuda:1", …), or the best there is if None.

    Raises `UsageError` naming what there is.
    """
    import torch

    cuda = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    present = [*cuda, *(["mps"] if torch.backends.mps.is_available() else []), "cpu"]
    if wanted is None:
        return present[0]
    device = "cuda:0" if wanted == "cuda" else wanted
    if device not in present:
        raise UsageError(f"--device {wanted}: this machine has {', '.join(present)}")
    return device


def default_dtype(device: str) -> str:
    """The dtype that ``device`` computes in natively and fast."""
    if device.startswith("cuda"):
        return "bfloat16"
    if device == "mps":
        return "float16"
    return "bfloat16" if _cpu_flags() & _BFLOAT16_FLAGS else "float32"


def probe(device: str, threads: int, cache: Path | None = None) -> Hardware:
    """Measure ``device`` with ``threads`` CPU threads, in under two seconds. Blocks the calling thread.

    How fast it is is taken from the file ``cache`` where that knows it, and else written there.
    """
    return in_own_thread(lambda: _probed(device, threads, cache))


def _probed(device: str, threads: int, cache: Path | None) -> Hardware:
    import torch

    name, dtype = _name(device), default_dtype(device)
    kind = f"{name}, {device}, {os.cpu_count()} cores, {threads} threads, {dtype}, torch {torch.__version__}"
    speed = None if cache is None else recall(cache, kind, time.time())
    if speed is None:
        torch.set_num_threads(threads)
        with torch.inference_mode():
            speed = _measure_flops(device, getattr(torch, dtype)), _measure_bandwidth(device)
        if cache is not None:
            remember(cache, kind, *speed, time.time())
    return Hardware(name, _memory(device), *speed)


def return_memory() -> None:
    """Give memory that is free back to the system, the device's too. Needs torch to be there already."""
    import torch

    return_host_memory()
    torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()


def return_host_memory() -> None:
    """Give memory of this process that is free back to the system, in some milliseconds.

    Allocators keep what is freed for whoever asks next. glibc's keeps it per thread, so that weights which
    one thread has freed would not make room for the caches of another.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # not in every libc
        if trim is not None:
            trim(0)


def _measure_flops(device: str, dtype: torch.dtype) -> float:
    import torch

    size = 4096 if device.startswith("cuda") else 1024
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / _best_time(lambda: a @ b, device)


def _measure_bandwidth(device: str) -> float:
    import torch

    data = torch.ones(_BANDWIDTH_BYTES // 4, device=device)
    return _BANDWIDTH_BYTES / _best_time(data.sum, device)


def _best_time(work: Callable[[], torch.Tensor], device: str) -> float:
    """Seconds of the fastest of several runs: disturbances only ever add."""

    deadline = time.perf_counter() + _PROBE_SECONDS
    best = float("inf")
    work()
    while True:
        began = time.perf_counter()
        result = work()
        if device != "cpu":
            result.flatten()[0].item()  # waits for the device
        now = time.perf_counter()
        best = min(best, now - began)
        if now > deadline:
            return best


def _memory(device: str) -> int:
    """Bytes that are free on the device now; on the CPU within the limits of its container."""
    import torch

    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    if device == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    available = int(psutil.virtual_memory().available)
    for path in _CGROUP_LIMITS:
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            return min(available, int(text) - psutil.Process().memory_info().rss)
    return available


def _name(device: str) -> str:
    import torch

    if device.startswith("cuda"):
        return str(torch.cuda.get_device_name(torch.device(device)))
    if device == "mps":
        return f"Apple {platform.machine()}"
    return _cpu_field("model name") or platform.processor() or platform.machine()


def _cpu_flags() -> frozenset[str]:
    return frozenset((_cpu_field("flags") or _cpu_field("Features") or "").split())


def _cpu_field(field: str) -> str | None:
    """The first entry of this name in the kernel's description of the CPU, where there is one."""
    if not _CPU_INFO.is_file():
        return None
    for line in _CPU_INFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return None
