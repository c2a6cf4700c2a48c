"""What this machine can do: devices, memory, speed. Only `choose_device` and `probe` need torch."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import psutil

from p2pllm.errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = [
    "Hardware",
    "choose_device",
    "default_dtype",
    "default_threads",
    "in_own_thread",
    "probe",
    "return_memory",
]

T = TypeVar("T")

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


def default_threads(local_peers: int) -> int:
    """This peer's share of the cores: peers that each take all cores are many times slower."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(1, local_peers))


def probe(device: str, threads: int) -> Hardware:
    """Measure ``device`` with ``threads`` CPU threads, in under two seconds. Blocks the calling thread."""
    return in_own_thread(lambda: _probed(device, threads))


def in_own_thread(work: Callable[[], T]) -> T:
    """Do ``work`` in a thread that ends with it. Blocks the calling thread.

    OpenMP keeps a team for every thread that has once computed with several, for as long as it lives. With
    more in all teams than cores none of them spins any more when it waits: steps take a third longer.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def _probed(device: str, threads: int) -> Hardware:
    import torch

    torch.set_num_threads(threads)
    dtype: torch.dtype = getattr(torch, default_dtype(device))
    with torch.inference_mode():
        flops = _measure_flops(device, dtype)
        bandwidth = _measure_bandwidth(device)
    return Hardware(_name(device), _memory(device), flops, bandwidth)


def return_memory() -> None:
    """Give memory that is free back to the system. Needs torch to be there already.

    Allocators keep what is freed for whoever asks next. glibc's keeps it per thread, so that weights which
    one thread has freed would not make room for the caches of another.
    """
    import torch

    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # not in every libc
        if trim is not None:
            trim(0)
    torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()


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
