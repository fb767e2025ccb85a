"""What this processor multiplies by instructions of its own, told by its flags."""

from functools import cache
from pathlib import Path

import torch

# By the flag that Linux shows, the best first. Without one of these, torch computes a product of
# bfloat16 numbers element by element: 4 to 90 times slower than in float32.
BFLOAT16_FLAGS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512_BF16"}


def capability() -> str:
    """Return AMX, AVX512_BF16, or else torch's own word for its kernels, such as AVX2."""
    usual = torch.backends.cpu.get_cpu_capability()
    if not usual.startswith("AVX512"):  # ATEN_CPU_CAPABILITY may forbid what the processor has
        return usual
    found = [word for flag, word in BFLOAT16_FLAGS.items() if flag in _flags()]
    return found[0] if found else usual


def multiplies_bfloat16() -> bool:
    """Tell whether this processor has instructions for products of bfloat16 numbers."""
    return capability() in BFLOAT16_FLAGS.values()


@cache
def _flags() -> frozenset[str]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    found = [line.partition(":")[2].split() for line in lines if line.startswith("flags")]
    return frozenset(found[0] if found else ())
