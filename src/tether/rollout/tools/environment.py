"""Environments of the user's: `reset` begins an episode, `step` answers each turn."""

import copy
import inspect
from collections.abc import Callable, Sequence
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
    """What answers the policy in one row. `stops` of the class (default: a line feed) are the texts
    that end a turn of the policy."""

    def reset(self, columns: dict[str, Any]) -> str | None:
        """Begin with the row's columns; the policy reads what it returns after the prompt."""
        ...

    def step(self, text: str) -> str | None:
        """Answer a turn of the policy, which reads what it returns next; None ends the episode."""
        ...


MakeEnvironment = Callable[[], Environment]


class EnvironmentHandler:
    """Turn each of the policy's turns into a step of an environment that was reset."""

    def __init__(self, end_marks: tuple[str, ...]) -> None:
        self.environment: Environment | None = None
        self.end_marks = end_marks
        self.began = False

    def begin(self, make: MakeEnvironment, columns: dict[str, Any]) -> object:
        """Make the environment and reset it, both under one time limit. It gets a copy of the row,
        which the samples of a prompt share."""
        self.environment = make()
        return self.environment.reset(copy.deepcopy(columns))

    def next_call(self, turn: str) -> ToolRequest | InvalidCall | Done:
        """Return the step for a turn; the episode is over if the reset failed."""
        if self.environment is None or not self.began:
            return Done()
        return ToolRequest("step", turn, self.environment.step, TIMEOUT_SECONDS, "{}")

    def unfinished_call(self, turn: str) -> None:
        """Return None: a turn that ends with EOS leaves nothing open."""
        return None


def _beginning(
    handler: EnvironmentHandler, make: MakeEnvironment, columns: dict[str, Any]
) -> Callable[[str], object]:
    return lambda _: handler.begin(make, columns)


def check_environment(make: Callable[[], object], where: str) -> None:
    """Refuse, before training, an environment that would fail on every row."""
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
    """Return the texts that end a turn of the policy."""
    stops = getattr(make, "stops", ("\n",))
    if isinstance(stops, str) or not stops or not all(isinstance(s, str) and s for s in stops):
        raise UserError(f"{where}: stops is {stops!r}; write a list of texts that end a turn.")
    return tuple(stops)


def environment_episodes(
    make: MakeEnvironment,
    prompts: Prompts,
    turn_tokens: TurnTokenizer,
    settings: RolloutSection,
    end_marks: tuple[str, ...],
) -> Sequence[MultiTurn]:
    """Return an episode per row, each with an environment that was reset. Where that failed, the
    episode ends with the policy's first turn."""
    handlers = [EnvironmentHandler(end_marks) for _ in prompts.ids]
    results = call_all(
        [
            ToolRequest("reset", "", _beginning(handler, make, columns), TIMEOUT_SECONDS, "{}")
            for handler, columns in zip(handlers, prompts.columns, strict=True)
        ]
    )
    episodes = []
    for ids, handler, result in zip(prompts.ids, handlers, results, strict=True):
        episode = MultiTurn(list(ids), handler, turn_tokens, settings)
        opening, error = result.value, result.error
        if error is None and isinstance(opening, str | None):
            handler.began = True
            if opening:
                said, _, _ = turn_tokens.observation(opening, "{}", settings.max_observation_tokens)
                episode.prompt_ids += said
        else:
            error = error or f"it returned {type(opening).__name__}, not text"
            episode.calls.append(
                Call(0, "reset", "", "", result.seconds, error=error, fault="tool")
            )
        episodes.append(episode)
    return episodes
