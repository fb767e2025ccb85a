"""Functions that the policy calls by name and JSON arguments, in its chat template's own form.

A turn ends with EOS. If it makes calls, they are made in their order, and the policy reads their
results as the template's messages of the role `tool`; if it makes none, the episode is over.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema

from tether.config import RolloutSection
from tether.errors import UserError, one_line
from tether.models.vocabulary import Vocabulary
from tether.rollout.call_forms import CallForm, FunctionCall, ToolMessages, find_form
from tether.rollout.sampler import Done, Observe
from tether.rollout.tool_calls import (
    InvalidArguments,
    ToolRequest,
    ToolResult,
    WrongResult,
    attempt,
)
from tether.rollout.tools.tool import TIMEOUT_SECONDS
from tether.rollout.turn_tokens import TurnTokenizer
from tether.rollout.turns import InvalidCall, MultiTurn, observation_text
from tether.support.background_loop import wait_for

JSON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


@dataclass(frozen=True)
class Function:
    """A function that the policy may call; `schema` is what the chat template is given."""

    schema: Mapping[str, Any]
    call: Callable[..., object]
    timeout_seconds: float = TIMEOUT_SECONDS

    @property
    def name(self) -> str:
        return self.schema["function"]["name"]

    def run(self, arguments: Mapping[str, Any]) -> str:
        """Call it; return what it returns as text."""
        value = wait_for(self.call(**arguments), self.timeout_seconds)
        if isinstance(value, bytes | bytearray):
            raise WrongResult(f"it returned {type(value).__name__}, not text")
        return str(value)


def function_schema(
    name: str, description: str, parameters: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return a schema as chat templates take it; `parameters` is a JSON schema of an object."""
    function = {"name": name, "description": description, "parameters": dict(parameters)}
    return {"type": "function", "function": function}


def one_text(name: str, description: str, parameter: str, meaning: str) -> Mapping[str, Any]:
    """Return the schema of a function that takes one text."""
    properties = {parameter: {"type": "string", "description": meaning}}
    parameters = {"type": "object", "properties": properties, "required": [parameter]}
    return function_schema(name, description, parameters)


def as_function(own: object, where: str, timeout_seconds: float = TIMEOUT_SECONDS) -> Function:
    """Return a user's function with the schema that its signature and docstring give."""
    if not callable(own):
        raise UserError(f"{where} is {type(own).__name__}, which cannot be called.")
    return checked(Function(read_schema(own, where), own, timeout_seconds))


def refuse_same_names(names: Sequence[str]) -> None:
    """Refuse two tools of one name."""
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"rollout.tools: two tools are called {name!r}; rename one.")


def read_schema(own: Callable[..., object], where: str) -> Mapping[str, Any]:
    """Return the schema of a function by transformers' own reading of it."""
    try:
        return get_json_schema(own)
    except Exception as error:  # of the docstring, of a type hint
        raise UserError(
            f"{where} has no schema: {one_line(error)} Give every argument a type and a line under "
            f"`Args:` in the docstring."
        ) from None


def checked(function: Function) -> Function:
    """Return a function that refuses arguments which do not fit its schema; the policy reads
    why."""

    def call(**arguments: Any) -> object:
        check_arguments(arguments, function.schema["function"].get("parameters") or {})
        return function.call(**arguments)

    return Function(function.schema, call, function.timeout_seconds)


def check_arguments(arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> None:
    """Raise `InvalidArguments` for a missing, unknown or mistyped argument, at the top level."""
    known = parameters.get("properties") or {}
    for name in parameters.get("required") or ():
        if name not in arguments:
            raise InvalidArguments(f"it needs an argument {name!r}")
    for name, value in arguments.items():
        if name not in known:
            raise InvalidArguments(f"it takes no argument {name!r}, only {', '.join(known)}")
        kind = known[name].get("type")
        types = JSON_TYPES.get(kind, ()) if isinstance(kind, str) else ()
        is_flag = isinstance(value, bool) and kind != "boolean"
        if types and (is_flag or not isinstance(value, types)):
            raise InvalidArguments(f"{name!r} is {type(value).__name__}, not {kind}")


@dataclass(frozen=True)
class Answer:
    """A call and what it returned."""

    call: FunctionCall
    result: ToolResult


@dataclass(frozen=True)
class ChatForm:
    """How a model calls functions and reads what they return; shared by all rows of a run."""

    calls: CallForm
    messages: ToolMessages
    turn_tokens: TurnTokenizer


def chat_form(vocabulary: Vocabulary, settings: RolloutSection) -> ChatForm:
    """Read the form from the model's chat template; a model without one is refused."""
    tokenizer, eos_ids = vocabulary.tokenizer, vocabulary.eos_ids
    if tokenizer.chat_template is None:
        raise UserError(
            "Calls in JSON have the form of the model's chat template, and this model has none; "
            "leave out rollout.tool_calls, or use a model that has one."
        )
    messages = ToolMessages(tokenizer, eos_ids)
    messages.check_room(settings.max_observation_tokens)
    return ChatForm(find_form(tokenizer), messages, TurnTokenizer(tokenizer, eos_ids, ()))


class FunctionHandler:
    """The functions of an episode: what to call for a turn of the policy."""

    end_marks: tuple[str, ...] = ()  # a turn ends with EOS

    def __init__(self, functions: Sequence[Function], form: ChatForm) -> None:
        self.functions = {function.name: function for function in functions}
        self.form = form

    def next_call(self, turn: str) -> ToolRequest | Done:
        """Return one request for all calls of a turn, made in their order."""
        calls = self.form.calls.read(turn)
        if not calls:
            return Done("eos")
        limits = [self.functions[c.name].timeout_seconds for c in calls if c.name in self.functions]

        def run(_: str) -> object:
            return [Answer(call, attempt(lambda c=call: self.make(c))) for call in calls]

        names, said = ", ".join(c.name for c in calls), "\n".join(c.text for c in calls)
        return ToolRequest(names, said, run, sum(limits) or TIMEOUT_SECONDS, "{}")

    def make(self, call: FunctionCall) -> str:
        """Make one call; raise `InvalidArguments` where it cannot be made."""
        if call.problem is not None:
            raise InvalidArguments(call.problem)
        if call.name not in self.functions:
            raise InvalidArguments(f"there is no such tool, only {', '.join(self.functions)}")
        return self.functions[call.name].run(call.arguments)

    def unfinished_call(self, turn: str) -> None:
        """Return None: what a turn leaves open is read when it ends."""
        return None


class FunctionEpisode(MultiTurn):
    """A prompt, the policy's turns, and the results of the functions that they call."""

    def __init__(
        self, prompt_ids: list[int], handler: FunctionHandler, settings: RolloutSection
    ) -> None:
        super().__init__(prompt_ids, handler, handler.form.turn_tokens, settings)
        self.functions = handler

    continues_after_eos = True  # EOS ends a turn and not the episode

    def next_call(self) -> ToolRequest | Observe | Done:
        """Return the calls of the turn that just ended; a turn without one is the last."""
        return asked_calls(self, self.functions)

    def observe(self, asked: ToolRequest | InvalidCall, returned: ToolResult) -> Observe | Done:
        """Encode what the calls returned."""
        assert isinstance(asked, ToolRequest)  # a malformed call is an answer among others
        return Observe(observe_answers(self, self.functions, asked, returned))


def said_text(episode: MultiTurn) -> str:
    """Return the text of the turn that just ended, without its EOS."""
    ids = episode.turn_ids
    ended = bool(ids) and ids[-1] in episode.turn_tokens.eos_ids
    return episode.turn_tokens.text(ids[:-1] if ended else ids)


def asked_calls(episode: MultiTurn, functions: FunctionHandler) -> ToolRequest | Done:
    """Return the calls of the turn that just ended, unless it is the last that there may be."""
    asked = functions.next_call(said_text(episode))
    if isinstance(asked, Done) or episode.turn + 1 < episode.settings.max_turns:
        return asked
    why = f"it came with turn {episode.turn + 1}, the last of rollout.max_turns"
    episode.note(asked, ToolResult(None, 0.0, f"not made: {why}", "policy"), "")
    return Done("eos")


def observe_answers(
    episode: MultiTurn, functions: FunctionHandler, asked: ToolRequest, returned: ToolResult
) -> list[int]:
    """Record the answers of a turn's calls, and return the ids that the policy reads."""
    answers = returned.value
    if not isinstance(answers, list):  # it took too long, and no call has an answer
        calls = functions.form.calls.read(said_text(episode))
        answers = [Answer(call, returned) for call in calls]
    limit, messages = episode.settings.max_observation_tokens, functions.form.messages
    texts = []
    for answer in answers:
        name, result = answer.call.name, answer.result
        text, cut = messages.cut(observation_text(name, result), limit)
        request = ToolRequest(name, answer.call.text, asked.run, 0.0, "{}")
        episode.note(request, result, text, cut)
        texts.append(text)
    episode.turn += 1
    episode.turn_ids = []
    return messages.ids([answer.call.name for answer in answers], texts)
