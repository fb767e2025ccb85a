"""Build the episodes of a run from `rollout.tools` or `rollout.environment`."""

from dataclasses import dataclass, field

from tether.config import (
    AnyTool,
    CalculatorTool,
    DataSection,
    McpTool,
    OwnTool,
    RolloutSection,
    SearchTool,
)
from tether.data.chat_templates import offer_tools
from tether.models.vocabulary import Vocabulary
from tether.rollout.environments.build import build_environments
from tether.rollout.sampler import Episodes, single_turns
from tether.rollout.tools.calculator import calculate
from tether.rollout.tools.functions import (
    Function,
    FunctionEpisode,
    FunctionHandler,
    as_function,
    chat_form,
    checked,
    one_text,
    refuse_same_names,
)
from tether.rollout.tools.mcp import build_mcp, build_mcp_functions
from tether.rollout.tools.search import build_search
from tether.rollout.tools.tool import Tool, ToolHandler, as_tool
from tether.rollout.turn_tokens import TurnTokenizer
from tether.rollout.turns import MultiTurn
from tether.support.user_code import load_user_code
from tether.types import Prompts

SCHEMAS = {
    "search": one_text("search", "Find documents.", "query", "what to look for"),
    "calculator": one_text(
        "calculator", "Compute exactly.", "expression", "numbers with + - * / and parentheses"
    ),
}


@dataclass(frozen=True)
class EpisodeSource:
    """How the episodes of a run are made, and the lines of corpora that were left out."""

    episodes: Episodes
    broken: list[str] = field(default_factory=list)
    gives_rewards: bool = True  # False: an environment that never rewards anything


def build_episode_source(
    settings: RolloutSection, vocabulary: Vocabulary, data: DataSection | None = None
) -> EpisodeSource:
    """Return what makes an episode per prompt; the user's tools or environment are checked.

    `data` says how a prompt is rendered that comes from an environment.
    """
    if not settings.is_multi_turn:
        return EpisodeSource(single_turns)
    broken: list[str] = []
    if settings.environment is not None:
        tools = [own for tool in settings.tools for own in _build_functions(tool, broken)]
        environments = build_environments(settings.environment, settings, vocabulary, data, tools)
        return EpisodeSource(environments, broken, environments.gives_rewards)
    if settings.tool_calls == "json":
        return EpisodeSource(_function_episodes(settings, vocabulary, broken), broken)
    toolbox = ToolHandler([own for tool in settings.tools for own in _build_tools(tool, broken)])
    turn_tokens = TurnTokenizer(vocabulary.tokenizer, vocabulary.eos_ids, toolbox.end_marks)
    for tool in toolbox.tools:
        turn_tokens.check_room(tool.reply, settings.max_observation_tokens)

    def episodes(prompts: Prompts) -> list[MultiTurn]:
        return [MultiTurn(ids, toolbox, turn_tokens, settings) for ids in prompts.ids]

    return EpisodeSource(episodes, broken)


def _function_episodes(
    settings: RolloutSection, vocabulary: Vocabulary, broken: list[str]
) -> Episodes:
    """Return episodes that call functions in JSON; the chat template is given their schemas."""
    functions = [own for tool in settings.tools for own in _build_functions(tool, broken)]
    refuse_same_names([function.name for function in functions])
    form = chat_form(vocabulary, settings)
    offer_tools(vocabulary.tokenizer, [function.schema for function in functions])
    handler = FunctionHandler(functions, form)
    return lambda prompts: [FunctionEpisode(ids, handler, settings) for ids in prompts.ids]


def _build_functions(settings: AnyTool, broken: list[str]) -> list[Function]:
    match settings:
        case McpTool():
            return build_mcp_functions(settings, "rollout.tools mcp")
        case SearchTool() | CalculatorTool():
            tool = _build_tool(settings, broken)
            return [checked(Function(SCHEMAS[settings.kind], tool.call, tool.timeout_seconds))]
    own = load_user_code(settings.kind, "rollout.tools")
    return [as_function(own, settings.kind, settings.timeout_seconds)]


def _build_tools(settings: AnyTool, broken: list[str]) -> list[Tool]:
    if isinstance(settings, McpTool):
        return build_mcp(settings, "rollout.tools mcp")
    return [_build_tool(settings, broken)]


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
