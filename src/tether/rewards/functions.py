"""Find the reward functions that a config names, and call them by parameter name. No torch.

A reward is one function, or several whose weighted sum is the score. Three kinds of signature are
told apart by the names of the parameters:

    plain   f(prompt, response, finished, policy_turns, observations, and columns by name)
            -> number, TurnRewards, TokenRewards, a mapping of named parts to these, or None
    verl    f(data_source, solution_str, ground_truth, extra_info=None) -> number, or {"score": …}
    TRL     f(prompts, completions, and columns by name) -> list: one of the above per completion
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tether.errors import UserError
from tether.rewards.rules import RULES, check_constants
from tether.rewards.values import Said, WrongType, read_reward
from tether.support.user_code import load_user_code, refuse_async

if TYPE_CHECKING:  # the child that runs rewards starts faster without pydantic
    from tether.config import RewardSection

Reward = Callable[..., Any]  # called by keyword, with what its parameters name

LEARNED = "model:"
ENVIRONMENT = "environment"
ROW_ARGUMENTS = (
    *("prompt", "response", "finished", "policy_turns", "observations", "policy_tokens"),
)
VERL_COLUMNS = ("data_source", "ground_truth", "extra_info")


@dataclass(frozen=True)
class RewardPart:
    """One reward function as the config names it."""

    kind: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    name: str | None = None  # only where `reward.parts` gives it one

    @property
    def model(self) -> str | None:
        """PATH of `model:PATH`, a learned reward."""
        return self.kind.removeprefix(LEARNED) if self.kind.startswith(LEARNED) else None


def parts_of(section: "RewardSection") -> list[RewardPart]:
    """Return the parts of `reward.parts`, or `reward.kind` as the only one."""
    if section.kind is not None:
        return [RewardPart(section.kind, section.arguments)]
    return [
        RewardPart(part.kind, part.arguments, part.weight, part.name)
        for part in section.parts or ()
    ]


def learned_model(section: "RewardSection") -> str | None:
    """Return the reward model's name or path, where a reward model is the whole reward."""
    parts = parts_of(section)
    if len(parts) == 1 and parts[0].name is None:
        return parts[0].model
    for part in parts:
        if part.model is not None:
            raise UserError(
                f"reward.parts, {part.name}: a reward model must be the whole reward; write it as "
                f"reward.kind."
            )
    return None


def load_part(part: RewardPart) -> Reward:
    """Return the part's function, after checking that its constants fit."""
    where = "reward" if part.name is None else f"reward.parts, {part.name}"
    function = load_reward(part.kind, "reward.kind" if part.name is None else f"{where}: kind")
    from_row, names = row_arguments(function), inspect.signature(function).parameters
    for name in part.arguments:
        if name in from_row:
            raise UserError(f"{where}: arguments.{name} comes from the row; leave it out.")
        if name not in names and not takes_all(function):
            raise UserError(
                f"{where}: {part.kind} takes no argument {name!r}, only {', '.join(names)}."
            )
    try:
        check_constants(part.kind, part.arguments)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return function


def columns_for_reward(section: "RewardSection", reward: Reward | None) -> list[str]:
    """Return the columns that every data row must have: those that some part requires, or a
    function that was passed in Python."""
    if reward is not None:
        return required_columns(reward)
    if learned_model(section) is not None:
        return []
    found: dict[str, None] = {}
    for part in parts_of(section):
        if part.kind != ENVIRONMENT:
            found |= dict.fromkeys(required_columns(load_part(part), part.arguments))
    return list(found)


def load_reward(kind: str, field: str = "reward.kind") -> Reward:
    """Return a rule that ships, or the function `path/file.py:name` or `package.module:name`.

    `field` is where the config names it.
    """
    if kind in RULES:
        return RULES[kind]
    if ":" not in kind:
        raise UserError(
            f"{field} {kind!r} is not a rule that ships ({', '.join(RULES)}); "
            f"for your own write path/file.py:function or package.module:function."
        )
    function = load_user_code(kind, field, "function ")
    if not callable(function):
        place, _, name = kind.rpartition(":")
        raise UserError(f"{field}: {place} has no function {name!r}.")
    refuse_async(function, f"{field} {kind}")
    return function


def signature_of(function: Reward) -> Literal["plain", "verl", "trl"]:
    """Return which of the three kinds of signature a function has."""
    names = inspect.signature(function).parameters
    if "completions" in names:
        return "trl"
    return "verl" if "solution_str" in names else "plain"


def required_columns(function: Reward, arguments: Mapping[str, Any] | None = None) -> list[str]:
    """Return the columns that a function requires of a data row, besides its constants."""
    if not callable(function):
        raise UserError(f"The reward is {function!r}, which is not a function.")
    refuse_async(function, f"The reward {getattr(function, '__name__', function)}")
    known = {**row_arguments(function), **(arguments or {})}
    return [
        name
        for name, p in inspect.signature(function).parameters.items()
        if p.default is p.empty
        and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        and name not in known
    ]


def row_arguments(function: Reward) -> dict[str, str]:
    """Return the arguments that every row provides for this kind of signature, each with the name
    that the row has for it."""
    match signature_of(function):
        case "trl":
            return {"prompts": "prompt", "completions": "response"}
        case "verl":
            return {name: name for name in ROW_ARGUMENTS} | {"solution_str": "response"}
    return {name: name for name in ROW_ARGUMENTS}


def takes_all(function: Reward) -> bool:
    """Return whether a function takes **kwargs."""
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


def call_reward(
    function: Reward, row: Mapping[str, Any], arguments: Mapping[str, Any] | None = None
) -> float | None:
    """Return the score of one row; anything that is not a reward raises."""
    reward = judge_row(function, row, arguments).reward
    return None if reward is None else reward.total


def judge_row(
    function: Reward, row: Mapping[str, Any], arguments: Mapping[str, Any] | None = None
) -> Said:
    """Return what a function says of one row.

    Raises `WrongType` for what cannot be a reward, `ValueError` for a number that is not finite,
    and what the function raises.
    """
    match signature_of(function):
        case "trl":
            return read_reward(_only_score(function(**_named(function, _as_lists(row), arguments))))
        case "verl":
            return read_reward(function(**_named(function, _as_verl(function, row), arguments)))
        case "plain":
            return read_reward(function(**_named(function, row, arguments)))


def _named(
    function: Reward, offered: Mapping[str, Any], arguments: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the arguments that the function names, or all if it takes **kwargs. Constants win."""
    names = offered if takes_all(function) else inspect.signature(function).parameters
    return {k: v for k, v in offered.items() if k in names} | dict(arguments or {})


def _as_verl(function: Reward, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what verl passes: a function with **kwargs gets its four arguments and no more."""
    offered = {**row, "solution_str": row["response"]}
    if not takes_all(function):
        return offered
    names = (*VERL_COLUMNS, *inspect.signature(function).parameters, "solution_str")
    return {name: value for name, value in offered.items() if name in names}


def _as_lists(row: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return one row as TRL's lists of rows. In a conversation the completion is a message too."""
    prompt, completion = row["prompt"], row["response"]
    if not isinstance(prompt, str):
        completion = [{"role": "assistant", "content": completion}]
    columns = {name: [value] for name, value in row.items() if name not in ROW_ARGUMENTS}
    return {**columns, "prompts": [prompt], "completions": [completion]}


def _only_score(scores: Any) -> Any:
    if isinstance(scores, str | dict) or not hasattr(scores, "__len__"):
        kind = type(scores).__name__
        raise WrongType(f"the reward returned {kind}, not a list with a score per completion")
    if len(scores) != 1:
        raise ValueError(f"the reward returned {len(scores)} scores for 1 completion")
    return scores[0]
