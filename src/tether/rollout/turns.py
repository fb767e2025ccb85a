"""Episodes of several turns: the policy writes, something outside answers, the policy goes on.

A turn ends with the first token that completes an end mark, such as `</search>`. Nothing that was
sampled is ever encoded again; what the outside says is encoded once, and enters as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from tether.config import RolloutSection
from tether.rollout.sampler import Done, Episode, Observe
from tether.rollout.tool_calls import ToolRequest, ToolResult, call_all
from tether.rollout.turn_tokens import TurnTokenizer
from tether.types import Call


@dataclass(frozen=True)
class InvalidCall:
    """A call that cannot be made; the policy reads why."""

    name: str
    arguments: str
    why: str
    reply: str


@runtime_checkable
class TurnHandler(Protocol):
    """Who the policy talks to: the tools, or an environment."""

    end_marks: tuple[str, ...]  # texts that end a turn

    def next_call(self, turn: str) -> ToolRequest | InvalidCall | Done:
        """What to do with a turn that ended with an end mark."""
        ...

    def unfinished_call(self, turn: str) -> InvalidCall | None:
        """What was wrong with a turn that ended with EOS."""
        ...


class MultiTurn:
    """A prompt, and the policy's turns with what the outside answers between them."""

    def __init__(
        self,
        prompt_ids: list[int],
        handler: TurnHandler,
        turn_tokens: TurnTokenizer,
        settings: RolloutSection,
    ) -> None:
        self.prompt_ids = prompt_ids
        self.handler, self.turn_tokens, self.settings = handler, turn_tokens, settings
        self.calls: list[Call] = []
        self.turn = 0
        self.turn_ids: list[int] = []

    def add_token(self, token: int) -> bool:
        self.turn_ids.append(token)
        if token in self.turn_tokens.eos_ids:
            self._note_unfinished()
            return True
        if not self.turn_tokens.may_end(token):
            return False
        text = self.turn_tokens.text(self.turn_ids)
        return any(mark in text for mark in self.handler.end_marks)

    def answer(self) -> Observe | Done:
        [answer] = answer_all([self])
        return answer

    def next_call(self) -> ToolRequest | Observe | Done:
        """The call that the turn makes, or what follows it without one."""
        asked = self.handler.next_call(self.turn_tokens.text(self.turn_ids))
        if isinstance(asked, Done):
            return asked
        if self.turn + 1 >= self.settings.max_turns:
            why = f"it came with turn {self.turn + 1}, the last of rollout.max_turns"
            self._note(asked, ToolResult(None, 0.0, f"not made: {why}", "policy"), "")
            return Done()
        if isinstance(asked, InvalidCall):
            return self.observe(asked, ToolResult(None, 0.0, asked.why, "policy"))
        return asked

    def observe(self, asked: ToolRequest | InvalidCall, returned: ToolResult) -> Observe | Done:
        """From what a call returned to the tokens that the policy reads; None ends the episode."""
        if returned.error is None and returned.value is None:
            self._note(asked, returned, "")
            return Done()
        returned = _only_text(returned)
        text = observation_text(asked.name, returned)
        ids, read, cut = self.turn_tokens.observation(
            text, asked.reply, self.settings.max_observation_tokens
        )
        self._note(asked, returned, read, cut)
        self.turn += 1
        self.turn_ids = []
        return Observe(ids)

    def _note(
        self, asked: ToolRequest | InvalidCall, returned: ToolResult, result: str, cut: bool = False
    ) -> None:
        self.calls.append(
            Call(
                turn=self.turn,
                name=asked.name,
                arguments=asked.arguments,
                result=result,
                seconds=returned.seconds,
                cut=cut,
                error=returned.error,
                fault=returned.fault,
            )
        )

    def _note_unfinished(self) -> None:
        wrong = self.handler.unfinished_call(self.turn_tokens.text(self.turn_ids))
        if wrong is not None:
            self._note(wrong, ToolResult(None, 0.0, wrong.why, "policy"), "")


def answer_all(episodes: Sequence[Episode]) -> list[Observe | Done]:
    """What follows the turns of these episodes, in their order. Calls are made at the same time;
    all else, tokenising above all, happens here and in order."""
    asked = [e.next_call() if isinstance(e, MultiTurn) else e.answer() for e in episodes]
    returned = iter(call_all([one for one in asked if isinstance(one, ToolRequest)]))
    return [
        episode.observe(one, next(returned)) if isinstance(one, ToolRequest) else one
        for episode, one in zip(episodes, asked, strict=True)
    ]


def observation_text(name: str, returned: ToolResult) -> str:
    """What the policy reads. Of a failure it reads that there was one and no more: its details
    may differ from run to run, and belong to whoever watches."""
    match returned.fault:
        case "policy":
            return f"Invalid call of {name}: {returned.error}."
        case "tool":
            return f"The call of {name} failed."
    return str(returned.value)


def _only_text(returned: ToolResult) -> ToolResult:
    if returned.error is not None or isinstance(returned.value, str):
        return returned
    kind = type(returned.value).__name__
    return ToolResult(None, returned.seconds, f"it returned {kind}, not text", "tool")
