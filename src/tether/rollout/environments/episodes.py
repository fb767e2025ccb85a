"""Episodes with an environment: each turn of the policy is a step, which may be rewarded.

A reward belongs to the turn that earned it. It is kept per run of sampled tokens, as the mask tells
them apart: where an observation has no tokens, the turns around it share one entry.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from tether.config import DataSection, EnvironmentSection, RolloutSection
from tether.data.messages import Prompt, prompt_text, render_prompt
from tether.errors import UserError
from tether.rollout.environments.environment import (
    Environment,
    MakeEnvironment,
    begin,
    take_step,
)
from tether.rollout.environments.results import Step
from tether.rollout.sampler import Done, Episode, Observe
from tether.rollout.tool_calls import ToolRequest, ToolResult, call_all
from tether.rollout.turn_tokens import LONGEST_TOKEN, TurnTokenizer
from tether.rollout.turns import InvalidCall, MultiTurn
from tether.support.background_loop import wait_for
from tether.types import Call, Prompts


@dataclass(frozen=True)
class EnvironmentKind:
    """How a run makes environments, and how a turn of the policy ends in them."""

    make: MakeEnvironment
    end_marks: tuple[str, ...]  # without any, a turn ends with EOS
    reply: str  # what is around an observation, with {} in its place
    settings: EnvironmentSection


class StepHandler:
    """Turn each of the policy's turns into a step of an environment that was reset."""

    def __init__(self, kind: EnvironmentKind) -> None:
        self.kind = kind
        self.end_marks = kind.end_marks
        self.environment: Environment | None = None
        self.began = False  # the reset worked, and no call hangs
        self.hangs = False  # a thread may still be at work in it

    def begin(self, columns: dict[str, Any]) -> Prompt | None:
        """Make the environment and reset it, both under one time limit."""
        self.environment = self.kind.make()
        return begin(self.environment, columns, self.kind.settings.timeout_seconds)

    def next_call(self, turn: str) -> ToolRequest | InvalidCall | Done:
        """Return the step for a turn; the episode is over if the reset failed."""
        environment, limit = self.environment, self.kind.settings.timeout_seconds
        if environment is None or not self.began:
            return Done()

        def step(text: str) -> object:
            return take_step(environment, text, limit)

        return ToolRequest("step", turn, step, limit, self.kind.reply)

    def unfinished_call(self, turn: str) -> None:
        """Return None: a turn that ends with EOS leaves nothing open."""
        return None


class EnvironmentEpisode(MultiTurn):
    """A prompt, the policy's turns, and what an environment says and gives for each."""

    def __init__(
        self,
        prompt_ids: list[int],
        handler: StepHandler,
        turn_tokens: TurnTokenizer,
        settings: RolloutSection,
    ) -> None:
        super().__init__(prompt_ids, handler, turn_tokens, settings)
        self.steps = handler
        self.prompt: Prompt | None = None  # where `reset` gave it
        self.failed = False
        self._rewards: list[float | None] = []
        self._in_turn = False

    @property
    def continues_after_eos(self) -> bool:
        """Whether EOS ends a turn and not the episode."""
        return not self.steps.end_marks

    @property
    def turn_rewards(self) -> tuple[float | None, ...]:
        """What each turn was given; nothing where the environment failed."""
        return () if self.failed else tuple(self._rewards)

    def add_token(self, token: int) -> bool:
        """Take the next sampled token; return whether the policy's turn ends with it."""
        if not self._in_turn:
            self._rewards.append(None)
            self._in_turn = True
        return super().add_token(token)

    def next_call(self) -> ToolRequest | Observe | Done:
        """Return the step for the turn that just ended, also for the last one: it has a reward."""
        said = self.turn_ids[:-1] if self._ended_with_eos else self.turn_ids
        asked = self.steps.next_call(self.turn_tokens.text(said))
        assert not isinstance(asked, InvalidCall)  # a turn is text, and any text is a step
        return self._done() if isinstance(asked, Done) else asked

    def observe(self, asked: ToolRequest | InvalidCall, returned: ToolResult) -> Observe | Done:
        """Take a step's reward, and encode its observation; the end of the episode needs none."""
        step = returned.value if isinstance(returned.value, Step) else None
        self.failed |= returned.fault == "tool"
        if step is not None and step.reward is not None:
            self._rewards[-1] = (self._rewards[-1] or 0.0) + step.reward
        last = self.turn + 1 >= self.settings.max_turns
        if returned.abandoned or last or (step is not None and step.over):
            self.note(asked, returned, self._shortened(step))
            self._abandon(returned)
            cut_off = step is None or not step.terminated
            return Done("truncated") if cut_off and not returned.abandoned else self._done()
        if step is not None:
            returned = ToolResult(step.observation, returned.seconds)
        answer = super().observe(asked, returned)
        self._in_turn = isinstance(answer, Observe) and not answer.ids
        return answer

    def began_with(self, returned: ToolResult) -> Prompt | None:
        """Take what `reset` returned; where it failed, the episode ends with its first turn."""
        self.steps.began = returned.error is None
        self._abandon(returned)
        if returned.error is None:
            return cast(Prompt | None, returned.value)
        self.fail_reset(returned.error, returned.seconds)
        return None

    def fail_reset(self, error: str, seconds: float = 0.0) -> None:
        """Record that the episode could not begin."""
        self.failed, self.steps.began = True, False
        self.calls.append(Call(0, "reset", "", "", seconds, error=error, fault="tool"))

    def close_request(self) -> ToolRequest | None:
        """Return the call of the environment's `close`, if it has one and does not hang."""
        limit = self.steps.kind.settings.timeout_seconds
        close = getattr(self.steps.environment, "close", None)
        if not callable(close) or self.steps.hangs:
            return None

        def run(_: str) -> object:
            return wait_for(close(), limit)

        return ToolRequest("close", "", run, limit, "{}")

    def closed(self, returned: ToolResult) -> None:
        """Record a failure to close; what was rewarded stays."""
        if returned.error is not None:
            error = returned.error
            call = Call(self.turn, "close", "", "", returned.seconds, error=error, fault="tool")
            self.calls.append(call)

    @property
    def _ended_with_eos(self) -> bool:
        return bool(self.turn_ids) and self.turn_ids[-1] in self.turn_tokens.eos_ids

    def _done(self) -> Done:
        return Done("eos" if self._ended_with_eos else "stop")

    def _abandon(self, returned: ToolResult) -> None:
        if returned.abandoned:
            self.steps.hangs, self.steps.began = True, False

    def _shortened(self, step: Step | None) -> str:
        """Return an observation that no turn follows, as far as one would have been read."""
        text = "" if step is None else step.observation or ""
        return text[: self.settings.max_observation_tokens * LONGEST_TOKEN]


@dataclass(frozen=True)
class EnvironmentEpisodes:
    """Make an episode per row, each with an environment that was reset.

    What `reset` returns is read after the prompt; of a row that has none, it is the prompt.
    """

    kind: EnvironmentKind
    turn_tokens: TurnTokenizer
    settings: RolloutSection
    data: DataSection | None
    gives_rewards: bool = True

    def __call__(self, prompts: Prompts) -> Sequence[EnvironmentEpisode]:
        handlers = [self.handler() for _ in prompts.ids]
        limit = self.kind.settings.timeout_seconds
        results = call_all(
            [
                ToolRequest("reset", "", _beginning(handler, columns), limit, "{}")
                for handler, columns in zip(handlers, self.columns(prompts), strict=True)
            ]
        )
        episodes = []
        for row, (handler, result) in enumerate(zip(handlers, results, strict=True)):
            ids = list(prompts.ids[row])
            episode = self.episode(ids, handler)
            self._begin(episode, episode.began_with(result), prompts, row)
            episodes.append(episode)
        return episodes

    def handler(self) -> StepHandler:
        """Return what holds the environment of one row."""
        return StepHandler(self.kind)

    def episode(self, ids: list[int], handler: StepHandler) -> EnvironmentEpisode:
        """Return the episode of one row."""
        return EnvironmentEpisode(ids, handler, self.turn_tokens, self.settings)

    def columns(self, prompts: Prompts) -> Sequence[dict[str, Any]]:
        """Return what each row is reset with."""
        return prompts.columns

    def _begin(
        self, episode: EnvironmentEpisode, opening: Prompt | None, prompts: Prompts, row: int
    ) -> None:
        """Put what `reset` said into the prompt."""
        if not prompts.ids[row]:
            self._take_prompt(episode, opening, prompts.columns[row])
        elif not opening:
            return
        elif not isinstance(opening, str):
            episode.fail_reset("reset returned messages, but the row has a prompt of its own")
        elif self.kind.end_marks:
            limit = self.settings.max_observation_tokens
            said, _, _ = self.turn_tokens.observation(opening, "{}", limit)
            episode.prompt_ids += said
        else:
            opening = self.cut(opening)
            before = prompts.messages[row] or prompts.texts[row]
            episode.prompt_ids = self.rendered(joined(before, opening), prompts.columns[row])

    def _take_prompt(
        self, episode: EnvironmentEpisode, opening: Prompt | None, columns: dict[str, Any]
    ) -> None:
        problem = (
            "reset returned no text, and data.train is the environment"
            if episode.steps.began
            else None
        )
        limit = 0 if self.data is None else self.data.max_prompt_tokens
        if opening:
            try:
                episode.prompt_ids = self.rendered(opening, columns)
                problem = None
            except UserError as error:
                problem = f"reset returned a prompt that cannot be used: {error}"
            if len(episode.prompt_ids) > limit:
                problem = (
                    f"reset returned a prompt of {len(episode.prompt_ids)} tokens, more than "
                    f"data.max_prompt_tokens = {limit}"
                )
            episode.prompt = opening if problem is None else None
        if problem is not None:
            episode.fail_reset(problem)
        if episode.prompt is None:  # something to sample after, all the same
            episode.prompt_ids = [min(self.turn_tokens.eos_ids)]

    def cut(self, opening: str) -> str:
        """Return what `reset` said, cut to `max_observation_tokens` with a mark."""
        limit = self.settings.max_observation_tokens
        ids, read, was_cut = self.turn_tokens.observation(opening, "{}", limit)
        return self.turn_tokens.text(ids) if was_cut else read

    def rendered(self, prompt: Prompt, columns: dict[str, Any]) -> list[int]:
        """Return the ids of the prompt of a row with these columns."""
        system = None if self.data is None else self.data.system_prompt
        return render_prompt(self.turn_tokens.tokenizer, prompt, system)


def _beginning(handler: StepHandler, columns: dict[str, Any]) -> Callable[[str], object]:
    return lambda _: handler.begin(columns)


def joined(prompt: Prompt, opening: str) -> Prompt:
    """Return a prompt with what `reset` said at the end of its last message."""
    if isinstance(prompt, str):
        return prompt + opening
    last = prompt[-1]
    return [*prompt[:-1], {**last, "content": last["content"] + opening}]


def told_prompts(prompts: Prompts, episodes: Sequence[Episode]) -> Prompts:
    """Return the prompts with the texts that environments gave in the place of those they lack."""
    given = [getattr(episode, "prompt", None) for episode in episodes]
    if not any(given):
        return prompts
    return replace(
        prompts,
        texts=[
            old if new is None else prompt_text(new)
            for old, new in zip(prompts.texts, given, strict=True)
        ],
        ids=[episode.prompt_ids for episode in episodes],
        messages=[
            new if isinstance(new, list) else old
            for old, new in zip(prompts.messages, given, strict=True)
        ],
    )
