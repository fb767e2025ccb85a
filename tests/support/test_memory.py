"""Memory that was freed between blocks that stay goes back to the system when it is asked for."""

from pathlib import Path

import pytest
import torch

from tether.support.memory import WORTH_GIVING_BACK, return_freed_memory


def resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 2**10 for line in lines if line.startswith("VmRSS"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux says what it has")
def test_holes_of_freed_weights_are_given_back():
    torch.ones(2**22)  # 16 MiB, mapped and freed: from here on glibc keeps smaller ones in its heap
    weights = [torch.ones(2**16) for _ in range(512)]  # 256 KiB each
    stay = weights[1::2]
    size = sum(weight.nbytes for weight in weights[::2])
    assert size >= WORTH_GIVING_BACK
    del weights
    before = resident()
    return_freed_memory(WORTH_GIVING_BACK - 1)
    assert before - resident() < size / 4
    return_freed_memory(size)
    assert before - resident() > 0.8 * size
    assert all(bool((weight == 1).all()) for weight in stay)
