"""Episodes of several turns: the policy writes, a tool or environment answers, and so on.

A turn ends with the first token that completes an end mark, such as `</search>`. Sampled tokens
are never encoded again; an observation is encoded once. Only sampled tokens are in the loss: the
mask of observations is False, as in Search-R1 (arXiv 2503.09516).
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
    """A call that cannot be made; the policy is told why."""

    name: str
    arguments: str
    why: str
    reply: str


@runtime_checkable
class TurnHandler(Protocol):
    """What answers the policy: the tools, or an environment."""

    end_marks: tuple[str, ...]  # texts that end a turn

    def next_call(self, turn: str) -> ToolRequest | InvalidCall | Done:
        """Return what to do after a turn that ended with an end mark."""
        ...

    def unfinished_call(self, turn: str) -> InvalidCall | None:
        """Return the call that a turn began but did not finish before EOS."""
        ...


class MultiTurn:
    """A prompt, and the policy's turns with the observations between them."""

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
        """Take the next sampled token; return whether the policy's turn ends with it."""
        self.turn_ids.append(token)
        if token in self.turn_tokens.eos_ids:
            self._note_unfinished()
            return True
        if not self.turn_tokens.may_end(token):
            return False
        text = self.turn_tokens.text(self.turn_ids)
        return any(mark in text for mark in self.handler.end_marks)

    def answer(self) -> Observe | Done:
        """Return what follows the turn that just ended."""
        [answer] = answer_all([self])
        return answer

    def next_call(self) -> ToolRequest | Observe | Done:
        """Return the call that the turn makes, or what follows it without one."""
        asked = self.handler.next_call(self.turn_tokens.text(self.turn_ids))
        if isinstance(asked, Done):
            return asked
        if self.turn + 1 >= self.settings.max_turns:
            why = f"it came with turn {self.turn + 1}, the last of rollout.max_turns"
            self.note(asked, ToolResult(None, 0.0, f"not made: {why}", "policy"), "")
            return Done()
        if isinstance(asked, InvalidCall):
            return self.observe(asked, ToolResult(None, 0.0, asked.why, "policy"))
        return asked

    def observe(self, asked: ToolRequest | InvalidCall, returned: ToolResult) -> Observe | Done:
        """Encode what a call returned as tokens for the policy; None ends the episode."""
        if returned.error is None and returned.value is None:
            self.note(asked, returned, "")
            return Done()
        returned = _only_text(returned)
        text = observation_text(asked.name, returned)
        ids, read, cut = self.turn_tokens.observation(
            text, asked.reply, self.settings.max_observation_tokens
        )
        self.note(asked, returned, read, cut)
        self.turn += 1
        self.turn_ids = []
        return Observe(ids)

    def note(
        self, asked: ToolRequest | InvalidCall, returned: ToolResult, result: str, cut: bool = False
    ) -> None:
        """Record a call of this turn, what it returned, and what the policy reads of it."""
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
            self.note(wrong, ToolResult(None, 0.0, wrong.why, "policy"), "")


def answer_all(episodes: Sequence[Episode]) -> list[Observe | Done]:
    """Return what follows the turns of these episodes, in their order.

    Calls run at the same time; all else, such as tokenising, happens here and in order.
    """
    asked = [e.next_call() if isinstance(e, MultiTurn) else e.answer() for e in episodes]
    returned = iter(call_all([one for one in asked if isinstance(one, ToolRequest)]))
    answers: list[Observe | Done] = []
    for episode, one in zip(episodes, asked, strict=True):
        if isinstance(one, ToolRequest):
            assert isinstance(episode, MultiTurn)  # no other episode makes calls
            one = episode.observe(one, next(returned))
        answers.append(one)
    return answers


@runtime_checkable
class Closable(Protocol):
    """An episode that holds something to be closed when it is over."""

    def close_request(self) -> ToolRequest | None:
        """Return the call that closes it, if one is due."""
        ...

    def closed(self, returned: ToolResult) -> None:
        """Record how that went."""
        ...


def close_all(episodes: Sequence[Episode]) -> None:
    """Close what the episodes hold, now that they are over."""
    open_ones = [(e, e.close_request()) for e in episodes if isinstance(e, Closable)]
    asked = [(episode, request) for episode, request in open_ones if request is not None]
    results = call_all([request for _, request in asked])
    for (episode, _), returned in zip(asked, results, strict=True):
        episode.closed(returned)


def observation_text(name: str, returned: ToolResult) -> str:
    """Return the text that the policy sees.

    Of a tool's failure it sees only that there was one: details may differ from run to run.
    """
    if returned.shown is not None:
        return returned.shown
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
