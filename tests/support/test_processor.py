"""What the processor multiplies by instructions: told by flags, as torch may use them."""

import pytest
import torch
from helpers import table

from tether.support import processor


@table(
    ("kernels", "flags", "maker", "word", "bfloat16"),
    [
        ("AVX2", "avx2", "AuthenticAMD", "AVX2", False),
        ("AVX512", "avx2 avx512f", "AuthenticAMD", "AVX512", False),
        ("AVX512", "avx512f avx512_bf16", "AuthenticAMD", "AVX512_BF16", True),
        ("AVX512", "avx512f avx512_bf16", "GenuineIntel", "AVX512_BF16", False),
        ("AVX512", "avx512_bf16 amx_bf16", "GenuineIntel", "AMX", True),
        ("AVX2", "avx512_bf16 amx_bf16", "GenuineIntel", "AVX2", False),  # ATEN_CPU_CAPABILITY
    ],
)
def test_the_best_that_torch_may_use_is_named(kernels, flags, maker, word, bfloat16):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: kernels)
        patch.setattr(
            processor, "_cpuinfo", {"flags": f" {flags}", "vendor_id": f" {maker}"}.__getitem__
        )
        assert processor.capability() == word
        assert processor.multiplies_bfloat16() is bfloat16
