"""Build the episodes of a run from `rollout.tools` or `rollout.environment`."""

from dataclasses import dataclass, field
from typing import cast

from tether.config import CalculatorTool, OwnTool, RolloutSection, SearchTool
from tether.errors import UserError
from tether.models.vocabulary import Vocabulary
from tether.rollout.sampler import Episodes, single_turns
from tether.rollout.tools.calculator import calculate
from tether.rollout.tools.environment import (
    MakeEnvironment,
    check_environment,
    environment_episodes,
    stops_of,
)
from tether.rollout.tools.search import build_search
from tether.rollout.tools.tool import Tool, ToolHandler, as_tool
from tether.rollout.turn_tokens import TurnTokenizer
from tether.rollout.turns import MultiTurn
from tether.support.user_code import load_user_code
from tether.types import Prompts


@dataclass(frozen=True)
class EpisodeSource:
    """How the episodes of a run are made, and the lines of corpora that were left out."""

    episodes: Episodes
    broken: list[str] = field(default_factory=list)


def build_episode_source(settings: RolloutSection, vocabulary: Vocabulary) -> EpisodeSource:
    """Return what makes an episode per prompt; the user's tools or environment are checked."""
    if not settings.is_multi_turn:
        return EpisodeSource(single_turns)
    if settings.environment is not None:
        return EpisodeSource(_environments(settings.environment, settings, vocabulary))
    broken: list[str] = []
    toolbox = ToolHandler([_build_tool(tool, broken) for tool in settings.tools])
    turn_tokens = TurnTokenizer(vocabulary.tokenizer, vocabulary.eos_ids, toolbox.end_marks)
    for tool in toolbox.tools:
        turn_tokens.check_room(tool.reply, settings.max_observation_tokens)

    def episodes(prompts: Prompts) -> list[MultiTurn]:
        return [MultiTurn(ids, toolbox, turn_tokens, settings) for ids in prompts.ids]

    return EpisodeSource(episodes, broken)


def _environments(kind: str, settings: RolloutSection, vocabulary: Vocabulary) -> Episodes:
    where = f"rollout.environment {kind}"
    loaded = load_user_code(kind, "rollout.environment")
    if not callable(loaded):
        raise UserError(f"{where} is {type(loaded).__name__}; name a class, or what makes one.")
    check_environment(loaded, where)
    make = cast(MakeEnvironment, loaded)  # what it makes is the user's: a failing call has an event
    stops = stops_of(make, where)
    turn_tokens = TurnTokenizer(vocabulary.tokenizer, vocabulary.eos_ids, stops)
    turn_tokens.check_room("{}", settings.max_observation_tokens)
    return lambda prompts: environment_episodes(make, prompts, turn_tokens, settings, stops)


def _build_tool(settings: SearchTool | CalculatorTool | OwnTool, broken: list[str]) -> Tool:
    match settings:
        case SearchTool():
            tool, left_out = build_search(settings)
            broken += left_out
            return tool
        case CalculatorTool():
            return Tool(
                "calculator",
                "<calculate>{}</calculate>",
                "<result>{}</result>",
                calculate,
                settings.timeout_seconds,
            )
    return as_tool(
        load_user_code(settings.kind, "rollout.tools"), settings.kind, settings.timeout_seconds
    )
