"""What a launcher says in the environment. Imports no torch, so that a command can ask first."""

import os


def launched_size() -> int:
    """Processes that torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """This process among those of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))
