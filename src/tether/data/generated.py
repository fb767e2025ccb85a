"""Rows that no file holds: seeds of an environment, and questions of reasoning-gym.

Every row has a seed of its own. Held-out rows have others than training rows, as long as nobody
writes the same ones: `DataSection` refuses that.
"""

from collections.abc import Iterator

from tether.config import DataFile
from tether.data.files import FileRow
from tether.errors import UserError, describe
from tether.support.reasoning_gym import reasoning_gym_family


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
