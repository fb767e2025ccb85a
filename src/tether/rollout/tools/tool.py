"""Tools: a name, the pattern of a call, and a function from text to text."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tether.errors import UserError
from tether.rollout.sampler import Done
from tether.rollout.tool_calls import ToolRequest
from tether.rollout.turns import InvalidCall
from tether.support.user_code import refuse_async

ANSWER = ("<answer>", "</answer>")
TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True)
class Tool:
    """A function that the policy may call. `pattern` and `reply` are texts with {} for the argument
    and for the result."""

    name: str
    pattern: str
    reply: str
    call: Callable[[str], object]
    timeout_seconds: float = TIMEOUT_SECONDS

    @property
    def opening(self) -> str:
        """The mark that begins a call."""
        return self.pattern.partition("{}")[0]

    @property
    def closing(self) -> str:
        """The mark that ends a call."""
        return self.pattern.partition("{}")[2]


def as_tool(own: object, where: str, timeout_seconds: float = TIMEOUT_SECONDS) -> Tool:
    """Return the tool of a user's function or callable object, after checking it.

    The policy calls it by `<its_name>…</its_name>` unless it has a `pattern`, and reads the result
    in `<result>…</result>` unless it has a `reply`. `where` names it in messages.
    """
    if not callable(own):
        raise UserError(f"{where} is {type(own).__name__}, which cannot be called.")
    name = getattr(own, "name", None) or getattr(own, "__name__", None) or type(own).__name__
    pattern = getattr(own, "pattern", f"<{name}>{{}}</{name}>")
    reply = getattr(own, "reply", "<result>{}</result>")
    for field, text in (("pattern", pattern), ("reply", reply)):
        if not isinstance(text, str) or text.count("{}") != 1:
            raise UserError(f"{where}: {field} is {text!r}; write text with one {{}} in it.")
    if not all(pattern.split("{}")):
        raise UserError(f"{where}: pattern {pattern!r} needs text on both sides of its {{}}.")
    refuse_async(own, where)
    needed = required_parameters(own)
    if len(needed) > 1:
        raise UserError(
            f"{where} needs {len(needed)} arguments ({', '.join(needed)}), but a tool is called "
            f"with one text, the one between its marks; take that one and split it inside."
        )
    if not accepts_text(own):
        raise UserError(f"{where} takes no argument by position, but a tool is called with one.")
    return Tool(str(name), pattern, reply, own, timeout_seconds)


def required_parameters(function: Callable[..., object]) -> list[str]:
    """Return the arguments that a call cannot leave out; none where Python does not know them."""
    return [
        p.name
        for p in _parameters(function)
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]


def accepts_text(function: Callable[..., object]) -> bool:
    """Return whether a function can be called with one positional argument."""
    try:
        inspect.signature(function).bind("")
    except TypeError:
        return False
    except ValueError:  # some functions written in C do not say
        return True
    return True


def _parameters(function: Callable[..., object]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:
        return []


class ToolHandler:
    """The tools of a run: what to call for a turn of the policy.

    A turn ends with the first closing mark. If that is `</answer>`, the episode is over. Otherwise
    the turn must contain one opening mark, that of the closed tool: with none, with one inside
    another, or with two side by side the call is ambiguous and therefore invalid.
    """

    def __init__(self, tools: Sequence[Tool], where: str = "rollout.tools") -> None:
        self.tools = list(tools)
        marks = [mark for tool in tools for mark in (tool.opening, tool.closing)]
        for mark in marks:
            if marks.count(mark) > 1 or mark in ANSWER:
                raise UserError(f"{where}: two tools, or a tool and the answer, share {mark!r}.")
        self.end_marks = (*(tool.closing for tool in tools), ANSWER[1])

    def next_call(self, turn: str) -> ToolRequest | InvalidCall | Done:
        """Return what to do with a turn that ended with a closing mark."""
        closed = min(self.end_marks, key=lambda mark: turn.find(mark) % (len(turn) + 1))
        if closed == ANSWER[1]:
            return Done()
        [tool] = [tool for tool in self.tools if tool.closing == closed]
        before = turn[: turn.index(closed)]
        opened = self._opened(before)
        if opened == [tool.opening]:
            arguments = before.partition(tool.opening)[2].strip()
            return ToolRequest(tool.name, arguments, tool.call, tool.timeout_seconds, tool.reply)
        if not opened:
            return InvalidCall(tool.name, before, f"{closed} without {tool.opening}", tool.reply)
        why = f"{' and '.join(opened)} before {closed}, where one {tool.opening} belongs"
        return InvalidCall(tool.name, before, why, tool.reply)

    def unfinished_call(self, turn: str) -> InvalidCall | None:
        """Return the call that a turn which ended with EOS left open, if there is one."""
        for tool in self.tools:
            if tool.opening in turn:
                arguments = turn.partition(tool.opening)[2]
                return InvalidCall(tool.name, arguments, f"{tool.opening} never closed", tool.reply)
        return None

    def _opened(self, text: str) -> list[str]:
        """Return the opening marks of a text in their order."""
        marks = [*(tool.opening for tool in self.tools), ANSWER[0]]
        found = [
            (at, mark) for mark in marks for at in range(len(text)) if text.startswith(mark, at)
        ]
        return [mark for _, mark in sorted(found)]
