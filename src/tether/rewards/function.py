"""Finding a reward function and calling it by the names of its parameters. Imports no torch."""

import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tether.errors import UserError
from tether.rewards.rules import RULES

Reward = Callable[..., float | None]

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


def check_arguments(function: Reward, columns: Mapping[str, Any]) -> None:
    """Refuse a reward that asks for a column the data does not have."""
    for name, parameter in inspect.signature(function).parameters.items():
        required = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        )
        if required and name not in ROW_ARGUMENTS and name not in columns:
            raise UserError(
                f"The reward asks for {name!r}, but the data has only the columns "
                f"{', '.join(columns) or 'none'} (besides {', '.join(ROW_ARGUMENTS)})."
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
    if not math.isfinite(float(score)):
        raise ValueError(f"the reward returned {float(score)}")
    return float(score)


def _import_file(path: Path) -> object:
    spec = importlib.util.spec_from_file_location(f"tether_reward_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a user's file raises, it is the file that is named
        raise UserError(f"{path} does not import: {type(error).__name__}: {error}.") from None
    return module
