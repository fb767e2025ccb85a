"""The task families of reasoning-gym (arXiv 2505.24760), an extra. Imports no torch."""

import importlib
from typing import Any

from tether.errors import UserError, describe


def reasoning_gym_family(family: str, seed: int, size: int, arguments: dict[str, Any]) -> Any:
    """Return reasoning-gym's dataset of a family; item i is made from seed + i."""
    try:
        package = importlib.import_module("reasoning_gym")
    except ImportError:
        raise UserError(
            f"reasoning_gym:{family} needs the package: pip install '.[reasoning]'."
        ) from None
    factory = importlib.import_module("reasoning_gym.factory")
    if family not in factory.DATASETS:
        raise UserError(
            f"reasoning_gym has no family {family!r}; it has {', '.join(sorted(factory.DATASETS))}."
        )
    try:
        return package.create_dataset(family, seed=seed, size=size, **arguments)
    except Exception as error:  # its checks are assertions and errors of many types
        raise UserError(
            f"reasoning_gym:{family} refuses its arguments: {describe(error)}."
        ) from None
