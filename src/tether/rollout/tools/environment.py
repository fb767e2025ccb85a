"""A user's environment: `reset` says how an episode begins, `step` answers each turn."""

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from tether.config import RolloutSection
from tether.errors import UserError
from tether.rollout.sampler import Done
from tether.rollout.tool_calls import ToolRequest, call_all
from tether.rollout.tools.tool import TIMEOUT_SECONDS, required_parameters
from tether.rollout.turn_tokens import TurnTokenizer
from tether.rollout.turns import InvalidCall, MultiTurn
from tether.types import Call, Prompts


@runtime_checkable
class Environment(Protocol):
    """One is made for each row. `stops` of the class (default: a line feed) are the texts that
    end a turn of the policy."""

    def reset(self, columns: dict[str, Any]) -> str | None:
        """The row's columns; what it returns is read after the prompt."""
        ...

    def step(self, text: str) -> str | None:
        """A turn of the policy; what it returns is read next, and None ends the episode."""
        ...


class EnvironmentHandler:
    """What a turn asks of an environment: a step, as long as it has not failed to begin."""

    def __init__(self, end_marks: tuple[str, ...]) -> None:
        self.environment: Environment | None = None
        self.end_marks = end_marks
        self.began = False

    def begin(self, make: Callable[[], Environment], columns: dict[str, Any]) -> object:
        """Make the environment and reset it: both are the user's code, under one time limit. It
        gets a copy of the row, which the samples of a prompt share."""
        self.environment = make()
        return self.environment.reset(copy.deepcopy(columns))

    def next_call(self, turn: str) -> ToolRequest | InvalidCall | Done:
        if not self.began:
            return Done()
        return ToolRequest(
            "step", turn, lambda text: self.environment.step(text), TIMEOUT_SECONDS, "{}"
        )

    def unfinished_call(self, turn: str) -> None:
        return None


def _beginning(
    steps: EnvironmentHandler, make: Callable[[], Environment], columns: dict[str, Any]
) -> Callable[[str], object]:
    return lambda _: steps.begin(make, columns)


def check_environment(make: Callable[[], object], where: str) -> None:
    """Refuse, before training, what would fail on every row."""
    for parameter in required_parameters(make):
        raise UserError(
            f"{where} needs an argument {parameter!r}, but an environment is made without any; "
            f"give it a default, or read it from the row in `reset`."
        )
    methods = ("reset", "step") if inspect.isclass(make) else ()
    for name, wanted in zip(methods, ("the row's columns", "the turn's text"), strict=False):
        method = getattr(make, name, None)
        if not callable(method):
            raise UserError(f"{where} has no method {name!r}.")
        # `self` and one more
        if len(required_parameters(method)) > 2:
            raise UserError(f"{where}: {name} is called with {wanted} alone.")


def stops_of(make: Callable[[], object], where: str) -> tuple[str, ...]:
    stops = getattr(make, "stops", ("\n",))
    if isinstance(stops, str) or not stops or not all(isinstance(s, str) and s for s in stops):
        raise UserError(f"{where}: stops is {stops!r}; write a list of texts that end a turn.")
    return tuple(stops)


def environment_episodes(
    make: Callable[[], Environment],
    prompts: Prompts,
    turn_tokens: TurnTokenizer,
    settings: RolloutSection,
    end_marks: tuple[str, ...],
) -> Sequence[MultiTurn]:
    """An environment per row, all reset. One that cannot be made or reset ends with the policy's
    first turn."""
    rows = [EnvironmentHandler(end_marks) for _ in prompts.ids]
    returned = call_all(
        [
            ToolRequest("reset", "", _beginning(rows[i], make, columns), TIMEOUT_SECONDS, "{}")
            for i, columns in enumerate(prompts.columns)
        ]
    )
    episodes = []
    for ids, steps, result in zip(prompts.ids, rows, returned, strict=True):
        episode = MultiTurn(list(ids), steps, turn_tokens, settings)
        opening = result.value
        if result.error is None and not isinstance(opening, str | None):
            why = f"it returned {type(opening).__name__}, not text"
            result = replace(result, error=why, fault="tool")
        if result.error is not None:
            episode.calls.append(
                Call(0, "reset", "", "", result.seconds, error=result.error, fault="tool")
            )
        else:
            steps.began = True
            if opening:
                said, _, _ = turn_tokens.observation(opening, "{}", settings.max_observation_tokens)
                episode.prompt_ids += said
        episodes.append(episode)
    return episodes
