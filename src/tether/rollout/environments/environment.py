"""Environments of the user's: `reset` begins an episode, `step` answers each turn."""

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from tether.data.messages import Prompt
from tether.errors import UserError
from tether.rollout.environments.results import Step, read_reset, read_step
from tether.rollout.tools.tool import required_parameters
from tether.support.background_loop import wait_for


@runtime_checkable
class Environment(Protocol):
    """What answers the policy in one row.

    Either method may be `async def`. `stops` of the class are the texts that end a turn of the
    policy; without them a turn ends with EOS where the model has a chat template, and else with a
    line feed. There may be a `close`, called when the episode is over.
    """

    def reset(self, columns: dict[str, Any]) -> object:
        """Begin with the row's columns; the policy reads what it returns after the prompt."""
        ...

    def step(self, text: str) -> object:
        """Answer a turn of the policy; see `read_step` for what may be returned."""
        ...


MakeEnvironment = Callable[[], Environment]


def begin(environment: Environment, columns: Mapping[str, Any], seconds: float) -> Prompt | None:
    """Reset an environment with a copy of the row, which the samples of a prompt share."""
    row = copy.deepcopy(dict(columns))
    return read_reset(wait_for(_reset(environment, row), seconds))


def _reset(environment: Any, row: dict[str, Any]) -> object:
    """Call `reset` in the form of its signature: by keyword as Gymnasium has it, with the row's
    columns, or without arguments."""
    parameters = _parameters(environment.reset)
    by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = {p.name for p in parameters}
    if "seed" in names and not any(p.default is p.empty for p in by_place):
        offered = {"seed": row.get("seed"), "options": row}
        return environment.reset(**{k: v for k, v in offered.items() if k in names})
    if by_place or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return environment.reset(row)
    return environment.reset()


def _parameters(method: Callable[..., object]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(method).parameters.values())
    except (ValueError, TypeError):  # some functions written in C do not say
        return [inspect.Parameter("columns", inspect.Parameter.POSITIONAL_OR_KEYWORD)]


def take_step(environment: Environment, text: str, seconds: float) -> Step:
    """Answer a turn."""
    return read_step(wait_for(environment.step(text), seconds))


def check_environment(
    make: Callable[..., object], arguments: Mapping[str, Any], where: str
) -> None:
    """Refuse, before training, an environment that would fail on every row."""
    check_arguments_of(make, arguments, where)
    methods = ("reset", "step") if inspect.isclass(make) else ()
    for name, wanted in zip(methods, ("the row's columns", "the turn's text"), strict=False):
        method = getattr(make, name, None)
        if not callable(method):
            raise UserError(f"{where} has no method {name!r}.")
        # `self` and one more
        if len(required_parameters(method)) > 2:
            raise UserError(f"{where}: {name} is called with {wanted} alone.")


def check_arguments_of(
    make: Callable[..., object], arguments: Mapping[str, Any], where: str
) -> None:
    """Refuse arguments with which no environment can be made."""
    try:
        inspect.signature(make).bind(**arguments)
    except ValueError:  # some functions written in C do not say
        pass
    except TypeError as error:
        missing = [name for name in required_parameters(make) if name not in arguments]
        if missing:
            raise UserError(
                f"{where} needs an argument {missing[0]!r}; write it under "
                f"rollout.environment.arguments, give it a default, or read it from the row in "
                f"`reset`."
            ) from None
        raise UserError(f"{where} does not take rollout.environment.arguments: {error}.") from None


def stops_of(make: object, where: str) -> tuple[str, ...] | None:
    """Return the texts that end a turn of the policy; None if it does not say."""
    stops = getattr(make, "stops", None)
    if stops is None:
        return None
    if isinstance(stops, str) or not stops or not all(isinstance(s, str) and s for s in stops):
        raise UserError(f"{where}: stops is {stops!r}; write a list of texts that end a turn.")
    return tuple(stops)
