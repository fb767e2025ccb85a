"""A policy that says what a test wants it to say, token by token, to an episode."""

from tether.config import RolloutSection
from tether.models.vocabulary import Vocabulary
from tether.rollout.sampler import Done
from tether.rollout.tools.tool import Tool, ToolHandler
from tether.rollout.turn_tokens import TurnTokenizer
from tether.rollout.turns import MultiTurn


def settings(**fields) -> RolloutSection:
    defaults = {"tools": ["calculator"], "max_response_tokens": 400}
    return RolloutSection.model_validate({**defaults, **fields})


def echo(text: str) -> str:
    return f"you said {text}"


ECHO = Tool("echo", "<echo>{}</echo>", "<result>{}</result>", echo, 5.0)
OTHER = Tool("other", "<other>{}</other>", "<result>{}</result>", echo, 5.0)


def episode(tokenizer, tools=(ECHO, OTHER), **fields) -> MultiTurn:
    toolbox = ToolHandler(tools)
    eos_ids = frozenset([tokenizer.eos_token_id])
    turn_tokens = TurnTokenizer(tokenizer, eos_ids, toolbox.end_marks)
    return MultiTurn([1, 2], toolbox, turn_tokens, settings(**fields))


def vocabulary(tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer, frozenset([tokenizer.eos_token_id]))


def say(episode: MultiTurn, text: str) -> str | None:
    """Feed the text until a turn ends: the observation as text, or None where it was Done.
    What was left to say is kept in `episode.unsaid`."""
    tokenizer = episode.turn_tokens.tokenizer
    ids = tokenizer(text, add_special_tokens=False).input_ids
    for at, token in enumerate(ids):
        if episode.add_token(token):
            episode.unsaid = tokenizer.decode(ids[at + 1 :])
            answer = episode.answer()
            return None if isinstance(answer, Done) else tokenizer.decode(answer.ids)
    raise AssertionError(f"the turn did not end: {text!r}")
