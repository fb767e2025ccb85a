"""Finding a reward function and calling it by the names of its parameters. Imports no torch.

Three kinds of signature are told apart by those names:

    plain   f(prompt, response, finished, policy_turns, observations, and columns by name)
            -> number or None
    verl    f(data_source, solution_str, ground_truth, extra_info=None) -> number, or {"score": …}
    TRL     f(prompts, completions, and columns by name) -> list of a number or None a completion
"""

import contextlib
import importlib
import importlib.util
import inspect
import math
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from tether import assets
from tether.errors import UserError
from tether.rewards.rules import RULES

Reward = Callable[..., Any]

LARGEST_SCORE = 1e15  # its square is still finite in float32
LONGEST_PROBLEM = 500  # characters; what a reward raises may quote a whole response
ROW_ARGUMENTS = ("prompt", "response", "finished", "policy_turns", "observations")
VERL_COLUMNS = ("data_source", "ground_truth", "extra_info")


LONGEST_EXTRA = 2000  # characters of a text in verl's score dict that are kept


class WrongType(TypeError):
    """The function returned what cannot be a score, whatever the row."""


def load_reward(kind: str, field: str = "reward.kind") -> Reward:
    """A rule that ships, `path/file.py:function` or `package.module:function`; `field` is where
    the config names it."""
    if kind in RULES:
        return RULES[kind]
    if ":" not in kind:
        raise UserError(
            f"{field} {kind!r} is no rule that ships ({', '.join(RULES)}); "
            f"for your own write path/file.py:function or package.module:function."
        )
    function = load_own(kind, field, "function ")
    if not callable(function):
        place, _, name = kind.rpartition(":")
        raise UserError(f"{field}: {place} has no function {name!r}.")
    refuse_async(function, f"{field} {kind}")
    return function


def load_own(kind: str, field: str, what: str = "") -> object:
    """Return what `path/file.py:name` or `package.module:name` names; `field` is where the config
    names it."""
    place, _, name = kind.rpartition(":")
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise UserError(f"{field} names {place}, which is not a file{assets.looked_at(place)}.")
        module = import_file(Path(place))
    else:
        module = import_dotted(place, field)
    if not hasattr(module, name):
        raise UserError(f"{field}: {place} has no {what}{name!r}.")
    return getattr(module, name)


def refuse_async(function: Reward, who: str) -> None:
    call = getattr(function, "__call__", None)  # noqa: B004 (of an object: its method may be async)
    if any(map(inspect.iscoroutinefunction, (function, call))) or any(
        map(inspect.isasyncgenfunction, (function, call))
    ):
        raise UserError(
            f"{who} is an `async def`, which tether does not await; write a plain function, with "
            f"asyncio.run(...) inside if it needs one."
        )


def signature_of(function: Reward) -> Literal["plain", "verl", "trl"]:
    names = inspect.signature(function).parameters
    if "completions" in names:
        return "trl"
    return "verl" if "solution_str" in names else "plain"


def wanted_columns(function: Reward, arguments: Mapping[str, Any] | None = None) -> list[str]:
    """Columns of a data row that the reward cannot do without; its constants it has already."""
    if not callable(function):
        raise UserError(f"The reward is {function!r}, which is not a function.")
    refuse_async(function, f"The reward {getattr(function, '__name__', function)}")
    given = {**row_arguments(function), **(arguments or {})}
    return [
        name
        for name, p in inspect.signature(function).parameters.items()
        if p.default is p.empty
        and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        and name not in given
    ]


def row_arguments(function: Reward) -> dict[str, str]:
    """What every row has for this kind of signature, and where that comes from."""
    match signature_of(function):
        case "trl":
            return {"prompts": "prompt", "completions": "response"}
        case "verl":
            return {name: name for name in ROW_ARGUMENTS} | {"solution_str": "response"}
    return {name: name for name in ROW_ARGUMENTS}


def takes_all(function: Reward) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


def call_reward(
    function: Reward, row: Mapping[str, Any], arguments: Mapping[str, Any] | None = None
) -> float | None:
    """The function's score of one row; anything but a finite number or None is an error."""
    return judge_row(function, row, arguments)[0]


def judge_row(
    function: Reward, row: Mapping[str, Any], arguments: Mapping[str, Any] | None = None
) -> tuple[float | None, dict[str, Any]]:
    """Return the score of one row, and what else verl's score dict holds."""
    extras: dict[str, Any] = {}
    match signature_of(function):
        case "trl":
            score = _only_score(function(**_named(function, _as_lists(row), arguments)))
        case "verl":
            result = function(**_named(function, _as_verl(function, row), arguments))
            score = result["score"] if isinstance(result, dict) else result
            extras = _extras(result) if isinstance(result, dict) else {}
        case "plain":
            score = function(**_named(function, row, arguments))
    if score is None:
        return None, extras
    if "complex" in str(getattr(score, "dtype", "")):  # float() of numpy's drops a part
        raise WrongType(f"the reward returned {score}, a complex number; return a real one")
    if isinstance(score, str) or not hasattr(score, "__float__"):
        raise WrongType(f"the reward returned {type(score).__name__}, not a number")
    if not abs(float(score)) <= LARGEST_SCORE:  # False for NaN too
        raise ValueError(f"the reward returned {float(score)}")
    return float(score), extras


def _extras(result: Mapping[Any, Any]) -> dict[str, Any]:
    """As the run's files can keep them: numbers, truth values and text; anything else as text."""
    return {str(name): _plain(value) for name, value in result.items() if name != "score"}


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") and not isinstance(value, str) else value
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= LONGEST_EXTRA else f"{text[:LONGEST_EXTRA]} …"


def describe(error: BaseException) -> str:
    """What somebody's function raised and where, on one line that a person reads to its end."""
    kind = "TypeError" if isinstance(error, WrongType) else type(error).__name__
    text = " ".join(f"{kind}: {error}".split())
    short = text if len(text) <= LONGEST_PROBLEM else f"{text[:LONGEST_PROBLEM]} …"
    place = _place(error)
    return short if place is None else f"{short} ({place})"


def _place(error: BaseException) -> str | None:
    """The line at fault in the deepest file of the user's, or else of a library; none of an error
    that tether raised itself."""
    ours = str(Path(__file__).parents[1])
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen ")
    ]
    if not frames or ours in frames[-1].filename:
        return None
    foreign = [frame for frame in frames if ours not in frame.filename]
    own = [f for f in foreign if not any(place in f.filename for place in _LIBRARIES)]
    frame = (own or foreign)[-1]
    return f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}"


_LIBRARIES = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]


def _named(
    function: Reward, offered: Mapping[str, Any], arguments: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What the function names, or all if it takes whatever there is; constants come before."""
    names = offered if takes_all(function) else inspect.signature(function).parameters
    return {k: v for k, v in offered.items() if k in names} | dict(arguments or {})


def _as_verl(function: Reward, row: Mapping[str, Any]) -> dict[str, Any]:
    """verl hands over four arguments; one that takes anything gets those and no more."""
    offered = {**row, "solution_str": row["response"]}
    if not takes_all(function):
        return offered
    names = (*VERL_COLUMNS, *inspect.signature(function).parameters, "solution_str")
    return {name: value for name, value in offered.items() if name in names}


def _as_lists(row: Mapping[str, Any]) -> dict[str, list[Any]]:
    """One row as TRL's lists of rows. In a conversation the completion is a message as well."""
    prompt, completion = row["prompt"], row["response"]
    if not isinstance(prompt, str):
        completion = [{"role": "assistant", "content": completion}]
    columns = {name: [value] for name, value in row.items() if name not in ROW_ARGUMENTS}
    return {**columns, "prompts": [prompt], "completions": [completion]}


def _only_score(scores: Any) -> Any:
    if isinstance(scores, str | dict) or not hasattr(scores, "__len__"):
        kind = type(scores).__name__
        raise WrongType(f"the reward returned {kind}, not a list with a score per completion")
    if len(scores) != 1:
        raise ValueError(f"the reward returned {len(scores)} scores for 1 completion")
    return scores[0]


def import_file(path: Path) -> object:
    """The module of a user's own file, which may import the files beside it."""
    spec = importlib.util.spec_from_file_location(f"tether_own_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses, among others, look their module up there
    try:
        with _importing_from(path.resolve().parent):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever a user's file does, it is what is named
        raise UserError(f"{path} does not import: {describe(error)}.") from None
    return module


def import_dotted(name: str, field: str) -> object:
    """The module `package.module` of the working directory or of the installed packages."""
    try:
        with _importing_from(Path.cwd()):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name != missing and not name.startswith(f"{missing}."):  # something that it imports
            raise UserError(f"{name} does not import: {describe(error)}.") from None
        raise UserError(
            f"{field} names the module {name}, which is neither in {Path.cwd()} nor installed; "
            f"write path/file.py:NAME or package.module:NAME."
        ) from None
    except (Exception, SystemExit) as error:
        raise UserError(f"{name} does not import: {describe(error)}.") from None


@contextlib.contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Look there first, as Python does for a script; later, for what a function imports when it
    is called, there last, so that no file of the user's hides a module of somebody else's."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the file itself may have taken it out
            sys.path.remove(str(folder))
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
