"""Read the launcher's environment variables. Imports no torch, so that a command can ask first."""

import os


def launched_size() -> int:
    """Return the number of processes that torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_rank() -> int:
    """Return the rank of this process, 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Return the rank of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))
