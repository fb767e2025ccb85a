"""TRL's environment classes as they are: public methods are tools, `get_reward` scores the episode.

    reset(**row) -> text or None    begins an episode; the text stands after the row's prompt
    a public method                 a tool, with the schema of its type hints and docstring
    get_reward() -> number          what the episode earned, asked when it is over

As TRL documents `environment_factory` of its GRPOTrainer; the package is not needed. Where a tool
raises, the policy reads {'error': …} with what it raised, which is how such a class says no.
"""

import copy
import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from tether.config import DataSection, EnvironmentSection, RolloutSection
from tether.data.chat_templates import offer_tools
from tether.data.messages import Prompt, render_prompt
from tether.errors import UserError, describe
from tether.models.vocabulary import Vocabulary
from tether.rollout.environments.environment import check_arguments_of
from tether.rollout.environments.episodes import (
    EnvironmentEpisode,
    EnvironmentEpisodes,
    EnvironmentKind,
    StepHandler,
    joined,
)
from tether.rollout.environments.results import read_number, read_reset
from tether.rollout.sampler import Done, Observe
from tether.rollout.tool_calls import (
    Fault,
    InvalidArguments,
    ToolError,
    ToolRequest,
    ToolResult,
    WrongResult,
)
from tether.rollout.tools.functions import (
    ChatForm,
    Function,
    FunctionHandler,
    asked_calls,
    chat_form,
    checked,
    observe_answers,
    read_schema,
    refuse_same_names,
)
from tether.rollout.turns import InvalidCall
from tether.support.background_loop import wait_for
from tether.support.user_code import load_user_code
from tether.types import Call, EnvironmentState, Prompts

RESERVED = ("reset", "get_reward")  # public methods that are not tools
NOT_A_TOOL = ", a tool unless its name begins with _,"
ROUTE = "environment"  # the column that names a row's class, where there are several
MAX_STATE = 100_000  # characters of JSON; a longer attribute is not handed to the reward


@dataclass(frozen=True)
class TrlClass:
    """A class, or what makes an instance, with what is known of it before any is made."""

    make: Callable[[], Any]
    schemas: Mapping[str, Mapping[str, Any]]  # of its tools, by the method's name
    has_reward: bool


@dataclass(frozen=True)
class TrlClasses:
    """The classes of a run: one for all rows, or one by the row's column `environment`."""

    by_name: Mapping[str | None, TrlClass]
    shown_to: Mapping[str | None, PreTrainedTokenizerBase]  # whose template is told the tools
    form: ChatForm
    tools: Sequence[Function]  # of `rollout.tools`, which all rows have

    def name_of(self, columns: Mapping[str, Any]) -> str | None:
        """Return which class a row has; raise `WrongResult` for one that there is none of."""
        if None in self.by_name:
            return None
        name = columns.get(ROUTE)
        if not isinstance(name, str) or name not in self.by_name:
            known = ", ".join(str(one) for one in self.by_name)
            raise WrongResult(f"the row's column {ROUTE!r} is {name!r}; it must be one of {known}")
        return name

    def tokenizer_of(self, columns: Mapping[str, Any]) -> PreTrainedTokenizerBase | None:
        """Return the tokenizer that renders the row's prompt; None where all rows share one."""
        name = columns.get(ROUTE)
        return self.shown_to.get(name) if isinstance(name, str) else None


class TrlHandler(StepHandler):
    """An instance of a class, and the functions that its row may call."""

    def __init__(self, kind: EnvironmentKind, classes: TrlClasses) -> None:
        super().__init__(kind)
        self.classes = classes
        self.own: TrlClass | None = None
        self.instance: Any = None
        self.functions = MethodHandler([], classes.form)

    def begin(self, columns: dict[str, Any]) -> Prompt | None:
        """Make an instance and reset it with a copy of the row, which the samples of a prompt
        share."""
        name = self.classes.name_of(columns)
        own = self.classes.by_name[name]
        row = {k: v for k, v in columns.items() if name is None or k != ROUTE}
        self.own, self.instance = own, own.make()
        limit = self.kind.settings.timeout_seconds
        row = copy.deepcopy(_accepted(self.instance.reset, row))
        opening = read_reset(wait_for(self.instance.reset(**row), limit))
        methods = [
            Function(schema, getattr(self.instance, method), limit)
            for method, schema in own.schemas.items()
        ]
        made = [*(checked(one) for one in methods), *self.classes.tools]
        self.functions = MethodHandler(made, self.classes.form)
        return opening


class MethodHandler(FunctionHandler):
    """Functions of which the policy reads what they raise."""

    def make(self, call: Any) -> str:
        """Make one call. A `ValueError` is how a class refuses a call; any other exception is a
        failure of the class, though the policy reads both."""
        try:
            return super().make(call)
        except (InvalidArguments, WrongResult):
            raise
        except Exception as error:
            fault: Fault = "policy" if isinstance(error, ValueError) else "tool"
            raise ToolError(str({"error": str(error)}), describe(error), fault) from None


class TrlEpisode(EnvironmentEpisode):
    """A prompt, the policy's turns, what the methods returned, and the reward at the end."""

    steps: TrlHandler

    @property
    def turn_rewards(self) -> tuple[float | None, ...]:
        """The episode's reward on its last turn; nothing where there is none."""
        scored = self.steps.own is not None and self.steps.own.has_reward
        return super().turn_rewards if scored else ()

    @property
    def state(self) -> EnvironmentState | None:
        """The instance's public attributes, for rewards that read them; None where it failed."""
        if self.steps.hangs or not self.steps.began:
            return None
        return EnvironmentState(
            type(self.steps.instance).__name__, plain_state(self.steps.instance)
        )

    def next_call(self) -> ToolRequest | Observe | Done:
        """Return the calls of the turn that just ended; a turn without one is the last."""
        if not self.steps.began:
            return self._done()
        return asked_calls(self, self.steps.functions)

    def observe(self, asked: ToolRequest | InvalidCall, returned: ToolResult) -> Observe | Done:
        """Encode what the calls returned; a call that hangs ends the episode without a reward."""
        assert isinstance(asked, ToolRequest)  # a malformed call is an answer among others
        if returned.abandoned:
            self.note(asked, returned, "")
            self.failed = True
            self._abandon(returned)
            return self._done()
        ids = observe_answers(self, self.steps.functions, asked, returned)
        self._in_turn = not ids
        return Observe(ids)

    def close_request(self) -> ToolRequest | None:
        """Return the call of `get_reward`, asked of every episode that began, also one cut off."""
        own, limit = self.steps.own, self.steps.kind.settings.timeout_seconds
        if own is None or not own.has_reward or not self.steps.began or self.failed:
            return None

        def run(_: str) -> object:
            value = wait_for(self.steps.instance.get_reward(), limit)
            if value is None:
                raise WrongResult("it returned None, not a number")
            return read_number(value)

        return ToolRequest("get_reward", "", run, limit, "{}")

    def closed(self, returned: ToolResult) -> None:
        """Take the reward, or record why there is none."""
        if returned.error is None and self._rewards:
            self._rewards[-1] = cast(float, returned.value)
            return
        self._abandon(returned)
        self.failed = True
        error, seconds = returned.error, returned.seconds
        self.calls.append(Call(self.turn, "get_reward", "", "", seconds, error=error, fault="tool"))


def plain_state(instance: object) -> dict[str, Any]:
    """Return the public attributes that are plain data, as JSON holds it."""
    found: dict[str, Any] = {}
    for name, value in list(getattr(instance, "__dict__", {}).items()):
        if name.startswith("_"):
            continue
        try:
            text = json.dumps(value, allow_nan=False, default=_scalar)
        except Exception:  # a client, a lock, NaN: not data, and of any class
            continue
        if len(text) <= MAX_STATE:
            found[name] = json.loads(text)
    return found


def _scalar(value: Any) -> Any:
    """Return the number of a tensor or an array that holds one."""
    return value.item()


def _accepted(method: Callable[..., object], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that `reset` takes: all of them by **kwargs, else those that it names."""
    try:
        parameters = inspect.signature(method).parameters.values()
    except ValueError:  # some functions written in C do not say
        return dict(row)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(row)
    names = [p.name for p in parameters]
    return {name: value for name, value in row.items() if name in names}


def load_classes(section: EnvironmentSection) -> dict[str | None, TrlClass]:
    """Return the classes that `arguments` name, after checking them as far as it can be done."""
    where, given = "rollout.environment trl", dict(section.arguments)
    one, several = given.pop("class", None), given.pop("classes", None)
    if (one is None) == (several is None):
        raise UserError(
            f"{where} needs arguments: {{class: path/file.py:NAME}}, or {{classes: {{a: "
            f"path/file.py:A, …}}}} by the row's column `{ROUTE}`, and not both."
        )
    if several is not None and (not isinstance(several, dict) or not several):
        raise UserError(f"{where}: classes must map names to path/file.py:NAME.")
    named = {None: one} if several is None else several
    return {name: _load_class(kind, given, where) for name, kind in named.items()}


def _load_class(kind: object, arguments: Mapping[str, Any], where: str) -> TrlClass:
    if not isinstance(kind, str) or ":" not in kind:
        raise UserError(f"{where}: class is {kind!r}; write path/file.py:NAME.")
    loaded = load_user_code(kind, "rollout.environment.arguments.class")
    where = f"{where} {kind}"
    if not callable(loaded):
        raise UserError(f"{where} is {type(loaded).__name__}; name a class, or what makes one.")
    check_arguments_of(loaded, arguments, where)
    make = functools.partial(cast(Callable[..., Any], loaded), **arguments)
    methods = _methods(loaded, make, where)
    if "reset" not in methods:
        raise UserError(f"{where} has no method 'reset'.")
    schemas = {
        name: read_schema(method, f"{where}: its public method {name!r}{NOT_A_TOOL}")
        for name, method in methods.items()
        if name not in RESERVED
    }
    return TrlClass(make, schemas, "get_reward" in methods)


def _methods(
    loaded: Callable[..., object], make: Callable[[], Any], where: str
) -> dict[str, MethodType]:
    """Return the public methods by name, in the order of their names.

    Those of a class are read without making an instance, which may open connections.
    """
    if inspect.isclass(loaded):
        found = {n: m for n, m in inspect.getmembers(loaded, inspect.isroutine) if n[:1] != "_"}
        static = {n for n in found if isinstance(inspect.getattr_static(loaded, n), staticmethod)}
        return {
            name: member if inspect.ismethod(member) else MethodType(member, object())
            for name, member in found.items()
            if name not in static
        }
    try:
        instance = make()
    except (Exception, SystemExit) as error:  # it may raise anything
        raise UserError(f"{where} cannot be made: {describe(error)}.") from None
    return {n: m for n, m in inspect.getmembers(instance, inspect.ismethod) if n[:1] != "_"}


def show_tools(
    tokenizer: PreTrainedTokenizerBase,
    by_name: Mapping[str | None, TrlClass],
    tools: Sequence[Function],
) -> dict[str | None, PreTrainedTokenizerBase]:
    """Tell the chat template the tools of a row's class; each of several classes has a tokenizer of
    its own."""
    shown: dict[str | None, PreTrainedTokenizerBase] = {}
    for name, own in by_name.items():
        shown[name] = tokenizer if name is None else copy.copy(tokenizer)
        offer_tools(shown[name], [*own.schemas.values(), *(tool.schema for tool in tools)])
    return shown


@dataclass(frozen=True, kw_only=True)
class TrlEpisodes(EnvironmentEpisodes):
    """Make an episode per row, each with an instance of its class that was reset."""

    classes: TrlClasses

    def handler(self) -> TrlHandler:
        """Return what holds the instance of one row."""
        return TrlHandler(self.kind, self.classes)

    def episode(self, ids: list[int], handler: StepHandler) -> TrlEpisode:
        """Return the episode of one row."""
        return TrlEpisode(ids, handler, self.turn_tokens, self.settings)

    def columns(self, prompts: Prompts) -> list[dict[str, Any]]:
        """Return what each row is reset with: all of it, the prompt as well."""
        asked = [own or text for own, text in zip(prompts.messages, prompts.texts, strict=True)]
        return [
            {"prompt": prompt, **columns} if ids else columns
            for prompt, ids, columns in zip(asked, prompts.ids, prompts.columns, strict=True)
        ]

    def _begin(
        self, episode: EnvironmentEpisode, opening: Prompt | None, prompts: Prompts, row: int
    ) -> None:
        """Put what `reset` said into the prompt; of several classes, the tools of the row's too."""
        several = None not in self.classes.by_name
        if several and prompts.ids[row] and not isinstance(opening, list):
            asked = prompts.messages[row] or prompts.texts[row]
            ids = self.rendered(joined(asked, self.cut(opening or "")), prompts.columns[row])
            room = self.settings.max_observation_tokens
            room += 0 if self.data is None else self.data.max_prompt_tokens
            if len(ids) > room:
                episode.fail_reset(f"the prompt has {len(ids)} tokens with its tools, of {room}")
            else:
                episode.prompt_ids = ids
            return
        super()._begin(episode, opening, prompts, row)

    def rendered(self, prompt: Prompt, columns: dict[str, Any]) -> list[int]:
        """Return the ids of a prompt, with the tools of the row's class."""
        system = None if self.data is None else self.data.system_prompt
        tokenizer = self.classes.tokenizer_of(columns) or self.turn_tokens.tokenizer
        return render_prompt(tokenizer, prompt, system)


def build_trl(
    section: EnvironmentSection,
    settings: RolloutSection,
    vocabulary: Vocabulary,
    data: DataSection | None,
    tools: Sequence[Function],
) -> TrlEpisodes:
    """Return what makes an episode per row; the chat template is told the tools of the classes."""
    if data is not None and not data.chat_template:
        raise UserError(
            "rollout.environment trl calls tools in the form of the model's chat template; leave "
            "out data.chat_template: false."
        )
    by_name = load_classes(section)
    for own in by_name.values():
        refuse_same_names([*own.schemas, *(tool.name for tool in tools)])
    form = chat_form(vocabulary, settings)
    shown = show_tools(vocabulary.tokenizer, by_name, tools)
    return TrlEpisodes(
        kind=EnvironmentKind(_unused, (), "{}", section),
        turn_tokens=form.turn_tokens,
        settings=settings,
        data=data,
        gives_rewards=all(own.has_reward for own in by_name.values()),
        classes=TrlClasses(by_name, shown, form, tools),
    )


def _unused() -> Any:
    raise AssertionError("a row's class makes its instance")
