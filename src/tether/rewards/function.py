"""Finding a reward function and calling it by the names of its parameters. Imports no torch."""

import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tether.errors import UserError
from tether.rewards.rules import RULES

Reward = Callable[..., float | None]

LARGEST_SCORE = 1e15  # its square is still finite in float32
LONGEST_PROBLEM = 500  # characters; what a reward raises may quote a whole response
ROW_ARGUMENTS = ("prompt", "response", "finished")


def load_reward(kind: str) -> Reward:
    """A rule that ships, or `path/file.py:function`."""
    if kind in RULES:
        return RULES[kind]
    path, colon, name = kind.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise UserError(
            f"reward.kind {kind!r} is no rule that ships ({', '.join(RULES)}); "
            f"for your own write path/file.py:function."
        )
    if not Path(path).is_file():
        raise UserError(f"reward.kind names {path}, which is not a file.")
    function = getattr(_import_file(Path(path)), name, None)
    if not callable(function):
        raise UserError(f"reward.kind: {path} has no function {name!r}.")
    return function


def wanted_columns(function: Reward) -> list[str]:
    """Columns of a data row that the reward cannot do without."""
    if not callable(function):
        raise UserError(f"The reward is {function!r}, which is not a function.")
    return [
        name
        for name, p in inspect.signature(function).parameters.items()
        if p.default is p.empty
        and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        and name not in ROW_ARGUMENTS
    ]


def check_arguments(function: Reward, rows: Sequence[Mapping[str, Any]], path: str) -> None:
    """Refuse a reward that asks for a column which a data row does not have."""
    wanted = wanted_columns(function)
    for line, row in enumerate(rows, start=1):
        missing = [name for name in wanted if name not in row]
        if missing:
            raise UserError(
                f"The reward asks for {missing[0]!r}, but {path}, line {line} has only the columns "
                f"{', '.join(row) or 'none'} (besides {', '.join(ROW_ARGUMENTS)})."
            )


def call_reward(function: Reward, row: Mapping[str, Any]) -> float | None:
    """The function's score of one row; anything but a finite number or None is an error."""
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    arguments = row if takes_all else {k: v for k, v in row.items() if k in parameters}
    score = function(**arguments)
    if score is None:
        return None
    if isinstance(score, str) or not hasattr(score, "__float__"):
        raise TypeError(f"the reward returned {type(score).__name__}, not a number")
    if not abs(float(score)) <= LARGEST_SCORE:  # False for NaN too
        raise ValueError(f"the reward returned {float(score)}")
    return float(score)


def describe(error: BaseException) -> str:
    """What a reward raised, on one line that a person reads to its end."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= LONGEST_PROBLEM else f"{text[:LONGEST_PROBLEM]} …"


def _import_file(path: Path) -> object:
    spec = importlib.util.spec_from_file_location(f"tether_reward_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever a user's file does, it is what is named
        raise UserError(f"{path} does not import: {describe(error)}.") from None
    return module
