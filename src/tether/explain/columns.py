"""The columns that the reward wants beside a prompt: typed, from the data files, or worked out."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tether.config import Config
from tether.data.arithmetic import FORMS, state
from tether.data.files import BadRow, read_file
from tether.data.shapes import prompt_of, readable, reward_columns
from tether.errors import UserError
from tether.rewards.function import Reward
from tether.rewards.parts import columns_wanted


@dataclass(frozen=True)
class Columns:
    values: dict[str, Any]
    source: str  # "typed", "sum", or the file and line; "" where there are none


def find_columns(
    prompt: str, typed: Mapping[str, str], config: Config, reward: Reward | None
) -> Columns:
    """What is typed is enough if the reward wants no more; else the prompt's row in a data file
    is looked up, and a sum is worked out."""
    wanted = columns_wanted(config.reward, reward)
    if typed and set(wanted) <= set(typed):
        return Columns(dict(typed), "typed")
    found = _in_files(prompt, config) or _worked_out(prompt, config) or Columns({}, "")
    columns = Columns({**found.values, **typed}, "typed" if typed else found.source)
    missing = [name for name in wanted if name not in columns.values]
    if missing:
        raise UserError(
            f"The reward asks for {missing[0]!r}, and no row of the data has this prompt; give it "
            f"as --column {missing[0]}=VALUE."
        )
    return columns


def _in_files(prompt: str, config: Config) -> Columns | None:
    """The rest of the first row that asks exactly this."""
    column = config.data.prompt_column
    for file in config.data.files("train") + config.data.files("heldout"):
        for row in read_file(file.path):
            try:
                if readable(prompt_of(row.columns, column)) == prompt:
                    rest = reward_columns(row.columns, column, config.data.columns)
                    return Columns(rest, row.place)
            except BadRow:
                continue  # training refuses it or leaves it out; here another row is sought
    return None


def _worked_out(prompt: str, config: Config) -> Columns | None:
    """A prompt is a sum exactly if putting its numbers into one of the forms gives it back."""
    if config.reward.kind != "exact_answer":
        return None
    numbers = [int(digits) for digits in re.findall(r"[0-9]+", prompt)]
    if len(numbers) not in (2, 3):
        return None
    a, b, claim = (*numbers, 0)[:3]
    problems = [state(form, a, b, claim) for form in FORMS]
    answers = [problem.answer for problem in problems if problem.prompt == prompt]
    return Columns({"answer": answers[0]}, "sum") if answers else None
