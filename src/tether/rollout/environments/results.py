"""What an environment may return, read into one form.

`reset` returns text, None, (observation, info) as in Gymnasium, a mapping with `observation`, or,
where it is the data, the prompt's messages. `step` returns text, None for the end, (observation,
reward, terminated, truncated, info) as in Gymnasium, or a mapping with some of these names.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tether.data.files import BadRow
from tether.data.messages import Prompt, parse_prompt
from tether.rewards.values import LARGEST_SCORE
from tether.rollout.tool_calls import WrongResult

GYMNASIUM = ("observation", "reward", "terminated", "truncated", "info")
MAPPING = (*GYMNASIUM, "done")  # done: terminated, by its older name


@dataclass(frozen=True)
class Step:
    """What followed a turn: the text that is read next, the turn's reward, and whether it ended."""

    observation: str | None
    reward: float | None = None
    terminated: bool = False
    truncated: bool = False

    @property
    def over(self) -> bool:
        return self.terminated or self.truncated


def read_step(value: object) -> Step:
    """Return what `step` returned as a `Step`, or raise `WrongResult`."""
    if value is None:
        return Step(None, terminated=True)
    if isinstance(value, Step):
        return value
    if isinstance(value, str):
        return Step(value)
    if isinstance(value, tuple):
        if len(value) != len(GYMNASIUM):
            raise WrongResult(
                f"step returned {len(value)} values; return {', '.join(GYMNASIUM)}, or text"
            )
        return _from_mapping(dict(zip(GYMNASIUM, value, strict=True)))
    if isinstance(value, Mapping):
        return _from_mapping(value)
    raise WrongResult(f"step returned {_kind(value)}, not text")


def _from_mapping(given: Mapping[Any, Any]) -> Step:
    unknown = [str(name) for name in given if name not in MAPPING]
    if unknown:
        raise WrongResult(f"step returned {unknown[0][:60]!r}; the names are {', '.join(MAPPING)}")
    observation = given.get("observation")
    if not isinstance(observation, str | None):
        raise WrongResult(f"the observation is {_kind(observation)}, not text")
    step = Step(
        observation,
        None if given.get("reward") is None else read_number(given["reward"]),
        terminated=_flag(given, "terminated") or _flag(given, "done"),
        truncated=_flag(given, "truncated"),
    )
    if observation is None and not step.over:
        raise WrongResult("there is no observation, and the episode is neither over nor truncated")
    return step


def read_reset(value: object) -> Prompt | None:
    """Return the text, or the messages, that `reset` begins with, or raise `WrongResult`."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        value = value[0]
    elif isinstance(value, Mapping):
        unknown = [str(name) for name in value if name not in ("observation", "info")]
        if unknown:
            raise WrongResult(f"reset returned {unknown[0][:60]!r}; it takes observation and info")
        value = value.get("observation")
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list):
        try:
            return parse_prompt({"prompt": value}, "prompt")
        except BadRow as problem:
            raise WrongResult(f"reset returned messages that cannot be used: {problem}") from None
    raise WrongResult(f"reset returned {_kind(value)}, not text")


def read_number(value: Any) -> float:
    """Return a finite reward, or raise `WrongResult`."""
    if isinstance(value, str | complex) or not hasattr(value, "__float__"):
        raise WrongResult(f"the reward is {_kind(value)}, not a number")
    try:
        number = float(value)
    except Exception as error:  # an array of several numbers has __float__ too
        raise WrongResult(f"the reward is not a number: {error}") from None
    if not math.isfinite(number) or abs(number) > LARGEST_SCORE:
        raise WrongResult(f"the reward is {number}")
    return number


def _flag(given: Mapping[Any, Any], name: str) -> bool:
    value = given.get(name, False)
    if value is None or isinstance(value, str | bytes) or not hasattr(value, "__bool__"):
        raise WrongResult(f"{name} is {_kind(value)}, not true or false")
    return bool(value)


def _kind(value: object) -> str:
    return type(value).__name__
