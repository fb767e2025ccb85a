"""Rows that no file holds: seeds of an environment, and questions of reasoning-gym.

Every row has a seed of its own. Held-out rows have others than training rows, as long as nobody
writes the same ones: `DataSection` refuses that.
"""

import importlib
from collections.abc import Iterator
from typing import Any

from tether.config import DataFile
from tether.data.files import FileRow
from tether.errors import UserError, describe


def generated_rows(file: DataFile, prompt_column: str, heldout: bool) -> Iterator[FileRow]:
    """Yield the rows of `environment`, or of `reasoning_gym:FAMILY`."""
    seeds, arguments = file.seeds(heldout), file.own_arguments
    if file.is_environment:
        for number, seed in enumerate(seeds):
            yield FileRow(file.path, "row", number, {"seed": seed, **arguments})
        return
    family = file.path.partition(":")[2]
    questions = reasoning_gym_family(family, seeds.start, len(seeds), arguments)
    for number in range(len(seeds)):
        try:
            item = questions[number]
        except Exception as error:  # a family may raise anything over its arguments
            raise UserError(f"{file.path}, item {number}: {describe(error)}.") from None
        columns = {
            prompt_column: item["question"],
            "answer": str(item["answer"]),
            "reasoning_gym": {
                "family": family,
                "seed": seeds.start,
                "size": len(seeds),
                "index": number,
                "arguments": arguments,
            },
        }
        yield FileRow(file.path, "item", number, columns)


def reasoning_gym_family(family: str, seed: int, size: int, arguments: dict[str, Any]) -> Any:
    """Return reasoning-gym's dataset of a family; item i is made from seed + i."""
    try:
        package = importlib.import_module("reasoning_gym")
    except ImportError:
        raise UserError(
            f"reasoning_gym:{family} needs the package: pip install 'tether[reasoning]'."
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
