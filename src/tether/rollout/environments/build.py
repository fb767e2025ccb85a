"""Build what `rollout.environment` names."""

import functools
from collections.abc import Sequence
from typing import cast

from tether.config import TRL, DataSection, EnvironmentSection, RolloutSection
from tether.data.messages import without_chat_template
from tether.errors import UserError
from tether.models.vocabulary import Vocabulary
from tether.rollout.chat_turns import chat_reply
from tether.rollout.environments.environment import MakeEnvironment, check_environment, stops_of
from tether.rollout.environments.episodes import EnvironmentEpisodes, EnvironmentKind
from tether.rollout.environments.openenv import OpenEnvSession, check_server
from tether.rollout.environments.textarena import TextArenaGame, check_game
from tether.rollout.environments.trl import build_trl
from tether.rollout.tools.functions import Function
from tether.rollout.turn_tokens import TurnTokenizer
from tether.support.user_code import load_user_code

LINE_FEED = ("\n",)


def build_environments(
    section: EnvironmentSection,
    settings: RolloutSection,
    vocabulary: Vocabulary,
    data: DataSection | None,
    tools: Sequence[Function] = (),
) -> EnvironmentEpisodes:
    """Return what makes an episode per row; the environment is checked as far as it can be.

    `tools` are those that rows of kind trl may call beside the methods of their class.
    """
    if section.kind == TRL:
        return build_trl(section, settings, vocabulary, data, tools)
    match section.kind:
        case "textarena":
            check_game(section.arguments)
            make, stops = functools.partial(TextArenaGame, **section.arguments), None
        case "openenv":
            check_server(section.arguments)
            limit = section.timeout_seconds
            make = functools.partial(OpenEnvSession, timeout_seconds=limit, **section.arguments)
            stops = None
        case _:
            make, stops = _own(section)
    tokenizer, reply = vocabulary.tokenizer, "{}"
    if data is not None and not data.chat_template:
        tokenizer = without_chat_template(tokenizer)
    if stops is None and tokenizer.chat_template is not None:
        stops, reply = (), chat_reply(tokenizer, vocabulary.eos_ids)
    stops = LINE_FEED if stops is None else stops
    turn_tokens = TurnTokenizer(tokenizer, vocabulary.eos_ids, stops)
    turn_tokens.check_room(reply, settings.max_observation_tokens)
    kind = EnvironmentKind(make, stops, reply, section)
    return EnvironmentEpisodes(kind, turn_tokens, settings, data)


def _own(section: EnvironmentSection) -> tuple[MakeEnvironment, tuple[str, ...] | None]:
    """Return what makes the user's environment, and the texts that end a turn in it."""
    where = f"rollout.environment {section.kind}"
    loaded = load_user_code(section.kind, "rollout.environment")
    if not callable(loaded):
        raise UserError(f"{where} is {type(loaded).__name__}; name a class, or what makes one.")
    check_environment(loaded, section.arguments, where)
    make = functools.partial(loaded, **section.arguments)
    # What it makes is the user's: a call that fails costs its row.
    return cast(MakeEnvironment, make), stops_of(loaded, where)
