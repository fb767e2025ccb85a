"""Find the reward functions that a config names, and call them by parameter name. No torch.

A reward is one function, or several whose weighted sum is the score. Each is plain or `async`, or a
class whose objects are called and of which every worker makes one. Three kinds of signature are
told apart by the names of the parameters:

    plain   f(prompt, response, finished, policy_turns, observations, and columns by name)
            -> number, TurnRewards, TokenRewards, a mapping of named parts to these, or None
    verl    f(data_source, solution_str, ground_truth, extra_info=None) -> number, or {"score": …}
    TRL     f(prompts, completions, environments, and columns by name) -> list: one of the above
            per completion. It gets the rows of one prompt per call
"""

import asyncio
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

from tether.errors import UserError, describe
from tether.rewards.rules import RULES, check_constants
from tether.rewards.values import WrongType, read_reward
from tether.support.user_code import load_user_code

if TYPE_CHECKING:  # the child that runs rewards starts faster without pydantic
    from tether.config import RewardSection

Reward = Callable[..., Any]  # called by keyword, with what its parameters name
Row = Mapping[str, Any]
Answer = dict[str, Any]  # of one row: a `Said` as a dict, or {"error": sentence}

LEARNED = "model:"
ENVIRONMENT = "environment"
ENVIRONMENTS = "environments"  # TRL's name of what a function may see of each row's environment
JUDGE, HTTP = "judge", "http"
SOURCES = (ENVIRONMENT, JUDGE, HTTP)  # kinds that are not functions
IN_BRACES = re.compile(r"\{(\w+)\}")  # a column's name in a judge's prompt
TIME_LIMIT = " (reward.timeout_seconds)"
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
    from_row, names = row_arguments(function), {**made_with(function), **parameters_of(function)}
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
        if part.kind not in SOURCES:
            found |= dict.fromkeys(required_columns(load_part(part), part.arguments))
        elif part.kind == JUDGE:
            found |= dict.fromkeys(columns_of_judge(part))
    return list(found)


def columns_of_judge(part: RewardPart) -> list[str]:
    """Return the columns that a judge's prompts name."""
    texts = (part.arguments.get("system") or "", part.arguments["prompt"])
    names = [name for text in texts for name in IN_BRACES.findall(text)]
    return [name for name in dict.fromkeys(names) if name not in ROW_ARGUMENTS]


def load_reward(kind: str, field: str = "reward.kind") -> Reward:
    """Return a rule that ships, or the function or class `path/file.py:name` or
    `package.module:name`.

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
    refuse_uncallable(function, f"{field} {kind}")
    return function


def refuse_uncallable(function: Reward, name: str) -> None:
    """Refuse a class whose objects cannot be called, and a generator, which returns no number."""
    if inspect.isclass(function) and not _defines_call(function):
        raise UserError(f"{name} is a class without `__call__`; add one that returns the reward.")
    call = _called(function)
    if inspect.isasyncgenfunction(call) or inspect.isgeneratorfunction(call):
        raise UserError(f"{name} yields instead of returning a number; write `return`.")


def _called(function: Reward) -> Callable[..., Any]:
    """Return what runs when the reward is called: of an object or a class its `__call__`."""
    if inspect.isclass(function):
        return function.__call__
    if inspect.isroutine(function) or isinstance(function, functools.partial):
        return function
    return type(function).__call__


def _defines_call(function: type) -> bool:
    return any("__call__" in vars(base) for base in function.__mro__[:-1])


def parameters_of(function: Reward) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a call by name; those of a class are those of its objects."""
    if not inspect.isclass(function):
        return inspect.signature(function).parameters
    (_, *others) = inspect.signature(function.__call__).parameters.items()
    return dict(others)


def made_with(function: Reward) -> Mapping[str, inspect.Parameter]:
    """Return the parameters with which a class makes an object; none for a function."""
    return inspect.signature(function).parameters if inspect.isclass(function) else {}


def is_async(function: Reward) -> bool:
    """Return whether a call gives a coroutine."""
    return any(map(inspect.iscoroutinefunction, (function, _called(function))))


def signature_of(function: Reward) -> Literal["plain", "verl", "trl"]:
    """Return which of the three kinds of signature a function has."""
    names = parameters_of(function)
    if "completions" in names or (ENVIRONMENTS in names and "response" not in names):
        return "trl"
    return "verl" if "solution_str" in names else "plain"


def required_columns(function: Reward, arguments: Mapping[str, Any] | None = None) -> list[str]:
    """Return the columns that a function requires of a data row, besides its constants."""
    if not callable(function):
        raise UserError(f"The reward is {function!r}, which is not a function.")
    refuse_uncallable(function, f"The reward {getattr(function, '__name__', function)}")
    known = {**row_arguments(function), **(arguments or {})}
    for name in _needed(made_with(function)):
        if name not in (arguments or {}):
            raise UserError(
                f"The reward {getattr(function, '__name__', function)} is made with {name!r}; "
                f"write it in reward.arguments, or give it a default."
            )
    return [name for name in _needed(parameters_of(function)) if name not in known]


def _needed(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    return [
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
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
    return any(p.kind is p.VAR_KEYWORD for p in parameters_of(function).values())


class ReadyReward:
    """A reward that can be called: of a class, an object that is made here, once per worker."""

    def __init__(self, function: Reward, arguments: Mapping[str, Any] | None = None) -> None:
        arguments, for_object = dict(arguments or {}), made_with(function)
        if inspect.isclass(function):
            try:
                made = {name: value for name, value in arguments.items() if name in for_object}
                function = cast(Reward, function(**made))
            except (Exception, SystemExit) as error:  # it may raise anything
                raise UserError(
                    f"The reward {function.__name__} cannot be made: {describe(error)}."
                ) from None
        self.function = function
        named = parameters_of(function)
        self.arguments = {k: v for k, v in arguments.items() if k in named or k not in for_object}
        self.by_prompt = signature_of(function) == "trl"
        self.is_async = is_async(function)

    def call(self, rows: Sequence[Row]) -> Any:
        """Return what the function does: of several rows only one that takes all of a prompt."""
        return self.function(**self._offered(rows))

    def answers(self, rows: Sequence[Row]) -> list[Answer]:
        """Return an answer per row; what the function raises is told in it."""
        try:
            return self._read(self.call(rows), len(rows))
        except Exception as error:  # a reward may raise anything; the parent names the row
            return [failure(error)] * len(rows)

    async def answers_async(self, rows: Sequence[Row], seconds: float | None) -> list[Answer]:
        """Return an answer per row of an async function, within a time limit."""
        task = asyncio.ensure_future(self.call(rows))
        # A coroutine that holds on to its cancellation is not waited for.
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            task.cancel()
            return [{"error": f"the reward took longer than {seconds:g} s{TIME_LIMIT}"}] * len(rows)
        try:
            return self._read(task.result(), len(rows))
        except (Exception, asyncio.CancelledError) as error:
            return [failure(error)] * len(rows)

    def _offered(self, rows: Sequence[Row]) -> dict[str, Any]:
        match signature_of(self.function):
            case "trl":
                return _named(self.function, _as_lists(rows), self.arguments)
            case "verl":
                return _named(self.function, _as_verl(self.function, rows[0]), self.arguments)
        return _named(self.function, rows[0], self.arguments)

    def _read(self, result: Any, rows: int) -> list[Answer]:
        if inspect.isawaitable(result):
            raise WrongType("the reward returned a coroutine; write it as an `async def`")
        if not self.by_prompt:
            return [_read_row(result)]
        # None of TRL's functions among others is for rows that are not its own.
        return [
            {**_read_row(one), **({} if one is not None else {"abstains": True})}
            for one in _per_row(result, rows)
        ]


def failure(error: BaseException) -> Answer:
    """Return the answer for a row on which the reward failed."""
    if isinstance(error, WrongType):
        return {"error": str(error), "wrong_type": True}
    return {"error": describe(error)}


def _read_row(result: Any) -> Answer:
    try:
        return asdict(read_reward(result))
    except Exception as error:  # a number of the user's own may raise anything
        return failure(error)


def call_reward(
    function: Reward, row: Row, arguments: Mapping[str, Any] | None = None
) -> float | None:
    """Return the score of one row; anything that is not a reward raises."""
    ready = ReadyReward(function, arguments)
    result = ready.call([row])
    [only] = _per_row(result, 1) if ready.by_prompt else [result]
    reward = read_reward(only).reward
    return None if reward is None else reward.total


def _named(
    function: Reward, offered: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments that the function names, or all if it takes **kwargs. Constants win."""
    names = offered if takes_all(function) else parameters_of(function)
    return {k: v for k, v in offered.items() if k in names} | dict(arguments)


def _as_verl(function: Reward, row: Row) -> dict[str, Any]:
    """Return what verl passes: a function with **kwargs gets its four arguments and no more."""
    offered = {**row, "solution_str": row["response"]}
    if not takes_all(function):
        return offered
    names = (*VERL_COLUMNS, *parameters_of(function), "solution_str")
    return {name: value for name, value in offered.items() if name in names}


def _as_lists(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Return rows as TRL's lists. In a conversation a completion is a message too."""
    columns = {
        name: [row[name] for row in rows]
        for name in rows[0]
        if name not in ROW_ARGUMENTS and all(name in row for row in rows)
    }
    completions = [
        row["response"]
        if isinstance(row["prompt"], str)
        else [{"role": "assistant", "content": row["response"]}]
        for row in rows
    ]
    if ENVIRONMENTS in columns:
        columns[ENVIRONMENTS] = [_environment(row[ENVIRONMENTS]) for row in rows]
    return {**columns, "prompts": [row["prompt"] for row in rows], "completions": completions}


class EndedEnvironment:
    """An environment as a reward sees it: its public attributes that are plain data."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the environment {type(self).__name__} kept no {name!r}; a reward sees public "
            f"attributes that are plain data (numbers, text, lists), after the episode"
        )


def _environment(state: Any) -> Any:
    """Return an object with the attributes of an environment whose episode is over."""
    if not isinstance(state, Mapping) or set(state) != {"name", "values"}:
        return state  # a column of the data
    made = type(str(state["name"]), (EndedEnvironment,), {})()
    vars(made).update(state["values"])
    return made


def _per_row(results: Any, rows: int) -> list[Any]:
    if isinstance(results, str | dict) or not hasattr(results, "__len__"):
        kind = type(results).__name__
        raise WrongType(f"the reward returned {kind}, not a list with a score per completion")
    if len(results) != rows:
        completions = "1 completion" if rows == 1 else f"{rows} completions"
        raise ValueError(f"the reward returned {len(results)} scores for {completions}")
    return [results[i] for i in range(rows)]
