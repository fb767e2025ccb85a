"""What blocks take of a CPU's memory that come and go in an iteration.

Tensors on a CPU come from glibc, which maps blocks of 32 MiB and more one by one. Smaller ones
lie in a heap, where a freed one often leaves a hole that the next does not fit. While a Llama of
width 512 learnt on 1000 and 2000 tokens, the process grew by 1.41 to 1.54 times what was alive;
with every block mapped (M_MMAP_THRESHOLD) by 1.02 times, but took a fifth to a third more time.
"""

MAPPED, HOLES = 2**25, 1.45


def taken(size: int, device: str) -> int:
    """Bytes that a block of so many takes in the long run."""
    return round(HOLES * size) if device == "cpu" and size < MAPPED else size
