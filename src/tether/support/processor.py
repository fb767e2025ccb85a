"""What this processor multiplies by instructions of its own, told by its flags and its maker."""

import ctypes
import mmap
import os
from functools import cache
from pathlib import Path

import torch

# By the flag that Linux shows, the best first. Without one of these, torch computes a product of
# bfloat16 numbers element by element: 4 to 90 times slower than in float32.
BFLOAT16_FLAGS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512_BF16"}

AMD, INTEL = "AuthenticAMD", "GenuineIntel"

# push rbx; mov eax, 0x1d; xor ecx, ecx; cpuid; pop rbx; ret: the number of AMX's tile palettes.
ASK_FOR_PALETTES = bytes.fromhex("53 b8 1d 00 00 00 31 c9 0f a2 5b c3")


def capability() -> str:
    """Return AMX, AVX512_BF16, or else torch's own word for its kernels, such as AVX2."""
    usual = torch.backends.cpu.get_cpu_capability()
    if not usual.startswith("AVX512"):  # ATEN_CPU_CAPABILITY may forbid what the processor has
        return usual
    found = [word for flag, word in BFLOAT16_FLAGS.items() if flag in _flags()]
    if "AMX" in found and not tile_palettes():
        found.remove("AMX")
    return found[0] if found else usual


def hide_unusable_amx() -> None:
    """Keep oneDNN from AMX where its first product would end the process; call before that.

    Some virtual machines show AMX's flags and not the CPUID leaf with the shapes of its tiles.
    oneDNN then configures no tiles and uses them: an illegal instruction.
    """
    if "amx_bf16" in _flags() and not tile_palettes():
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


@cache
def tile_palettes() -> int:
    """Return how many palettes of AMX tiles the processor reports: 1 where AMX can be used.

    Asked of the processor itself (CPUID, leaf 0x1D), as Linux does not show it. Where memory
    cannot be made executable the flags are trusted.
    """
    try:
        code = mmap.mmap(-1, len(ASK_FOR_PALETTES), prot=mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:
        return 1
    code.write(ASK_FOR_PALETTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(code))
    return ctypes.CFUNCTYPE(ctypes.c_uint32)(address)()


def multiplies_bfloat16() -> bool:
    """Tell whether this processor's instructions for bfloat16 products are faster than float32's.

    AMX is. AVX512_BF16 is on AMD's processors; on Intel's, which have AMX beside it unless a
    virtual machine hides it, its products run at 0.6 of float32's rate (83 against 136 GFLOP/s of
    one Xeon core of the fifth generation). Told by name and not measured: a run repeats its bits.
    """
    found = capability()
    return found == "AMX" or (found == "AVX512_BF16" and maker() == AMD)


def _flags() -> frozenset[str]:
    return frozenset(_cpuinfo("flags").split())


def maker() -> str:
    """Return who made the processor, by its own word; nothing where Linux does not tell."""
    return _cpuinfo("vendor_id").strip()


@cache
def _cpuinfo(field: str) -> str:
    """Return what Linux says of the first processor; nothing elsewhere."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2] for line in lines if line.startswith(field)), "")
