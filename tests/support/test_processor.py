"""What the processor multiplies by instructions: told by flags, as torch may use them."""

import os
import subprocess
import sys

import pytest
import torch
from helpers import table

from tether.support import processor


@table(
    ("kernels", "flags", "palettes", "maker", "word", "bfloat16"),
    [
        ("AVX2", "avx2", 0, "AuthenticAMD", "AVX2", False),
        ("AVX512", "avx2 avx512f", 0, "AuthenticAMD", "AVX512", False),
        ("AVX512", "avx512f avx512_bf16", 0, "AuthenticAMD", "AVX512_BF16", True),
        ("AVX512", "avx512f avx512_bf16", 0, "GenuineIntel", "AVX512_BF16", False),
        ("AVX512", "avx512_bf16 amx_bf16", 1, "GenuineIntel", "AMX", True),
        ("AVX512", "avx512_bf16 amx_bf16", 0, "GenuineIntel", "AVX512_BF16", False),
        ("AVX2", "avx512_bf16 amx_bf16", 1, "GenuineIntel", "AVX2", False),  # ATEN_CPU_CAPABILITY
    ],
)
def test_the_best_that_torch_may_use_is_named(kernels, flags, palettes, maker, word, bfloat16):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: kernels)
        patch.setattr(
            processor, "_cpuinfo", {"flags": f" {flags}", "vendor_id": f" {maker}"}.__getitem__
        )
        patch.setattr(processor, "tile_palettes", lambda: palettes)
        assert processor.capability() == word
        assert processor.multiplies_bfloat16() is bfloat16


@table(
    ("flags", "palettes", "limit"),
    [("amx_bf16", 0, "AVX512_CORE_FP16"), ("amx_bf16", 1, None), ("avx512_bf16", 0, None)],
)
def test_onednn_is_kept_from_amx_only_where_tiles_have_no_shape(flags, palettes, limit):
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
        patch.setattr(processor, "_cpuinfo", {"flags": f" {flags}"}.__getitem__)
        patch.setattr(processor, "tile_palettes", lambda: palettes)
        processor.hide_unusable_amx()
        assert os.environ.get("ONEDNN_MAX_CPU_ISA") == limit


@pytest.mark.skipif(sys.platform != "linux", reason="asks the processor itself")
def test_a_product_in_bfloat16_does_not_end_the_process():
    """On a virtual machine that hides the shapes of AMX's tiles it would, by SIGILL."""
    program = (
        "import torch, tether.models.precision\n"
        "a = torch.ones(256, 256, dtype=torch.bfloat16)\n"
        "print((a @ a)[0, 0].item())"
    )
    environment = {k: v for k, v in os.environ.items() if k != "ONEDNN_MAX_CPU_ISA"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.strip()) == (0, "256.0")
