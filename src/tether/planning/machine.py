"""The machine that `tether check` runs on: its free memory and the speed of its products."""

import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from tether.support.processor import capability, multiplies_bfloat16

WIDTH = 768  # of the matrices that are multiplied
SECONDS = 0.3  # that are spent on it
UNKNOWN = 2**63  # bytes, where the system does not tell


@dataclass(frozen=True)
class Machine:
    """What a plan is compared with."""

    free_bytes: int
    teraflops: float  # of one process, float32 products
    capability: str = "unknown"  # AMX, AVX512_BF16, AVX2, ...; or cuda
    bfloat16_gain: float = 1.0  # how many times as fast products in bfloat16 are


def this_machine(device: str) -> Machine | None:
    """Measure this machine, before models are loaded: their memory is part of the plan.

    None where the plan is for GPUs and there is none.
    """
    if device.startswith("cuda") and not torch.cuda.is_available():
        return None
    usual = _teraflops(device, torch.float32)
    on_gpu = device != "cpu" and torch.cuda.is_available()
    name = "cuda" if on_gpu else capability()
    if not (on_gpu or multiplies_bfloat16()):
        return Machine(free_bytes(device), usual, name)
    gain = _teraflops(device, torch.bfloat16) / usual
    return Machine(free_bytes(device), usual, name, gain)


def free_bytes(device: str) -> int:
    """Return the free memory of the device, or of this machine and container."""
    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    return min(_available(), _left_of_cgroup())


def _available() -> int:
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.exists() else []
    found = [int(line.split()[1]) * 2**10 for line in lines if line.startswith("MemAvailable")]
    return found[0] if found else UNKNOWN


def _left_of_cgroup() -> int:
    """Return what is left of a container's limit."""
    try:
        limit, used = (
            Path("/sys/fs/cgroup", name).read_text().strip()
            for name in ("memory.max", "memory.current")
        )
    except OSError:
        return UNKNOWN
    return UNKNOWN if limit == "max" else max(0, int(limit) - int(used))


def _teraflops(device: str, number_format: torch.dtype) -> float:
    """Return the rate of the quickest of many products: what else runs here is not of the plan."""
    kind = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    a = torch.ones(WIDTH, WIDTH, device=kind, dtype=number_format)
    (a @ a).sum().item()
    quickest, ends = math.inf, time.perf_counter() + SECONDS
    while (began := time.perf_counter()) < ends:
        (a @ a)[0, 0].item()  # waits for a device that works on its own
        quickest = min(quickest, time.perf_counter() - began)
    return 2 * WIDTH**3 / quickest / 1e12
