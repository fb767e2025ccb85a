"""Score a rollout: responses go to the reward as text, numbers come back, failures are named."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any, Protocol, overload, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tether.algo.advantages import WeightedReward, overlong_penalty, place_scores
from tether.config import Config
from tether.dist.collectives import all_or_error
from tether.dist.rows import of_rows, spread
from tether.errors import RunStopped, UserError
from tether.models.vocabulary import Vocabulary
from tether.ppo.roles import Roles
from tether.rewards.scorers import Batch, EnvironmentScorer, Scorer, Verdict
from tether.rollout.sampler import Greedy, begin
from tether.run.metrics import Event, events_of_all
from tether.run.writer import shortest_floats
from tether.types import ALL_HERE, CUT_OFF, FinishReason, Prompts, Rollout, Rows, Scores

OVERLONG = "overlong"  # the part of the score that `reward.overlong` adds
QUOTED = 100  # characters of a prompt or a response that an event quotes


@runtime_checkable
class ScoringContext(Protocol):
    """What it takes to score a response. `Roles` is one."""

    @property
    def vocabulary(self) -> Vocabulary:
        """What decodes a response."""
        ...

    @property
    def reward(self) -> Scorer:
        """What scores its text."""
        ...


def response_texts(rollout: Rollout, vocabulary: Vocabulary) -> list[str]:
    """Return the text of every response, tool output included."""
    ids, lengths = rollout.response_ids.tolist(), rollout.response_lengths.tolist()
    return [vocabulary.decode(row[:length]) for row, length in zip(ids, lengths, strict=True)]


def response_text(rollout: Rollout, row: int, vocabulary: Vocabulary) -> str:
    """Return the text of one row."""
    return vocabulary.decode(rollout.response_ids[row, : rollout.response_lengths[row]].tolist())


def row_turns(
    rollout: Rollout, row: int, vocabulary: Vocabulary, response: str | None = None
) -> list[tuple[bool, str]]:
    """Return one response in turns: whether the policy wrote it, and its text.

    The mask tells turns apart, and not the tags in them, which either side may write. `response`
    is the text of the row, where it is known.
    """
    length = int(rollout.response_lengths[row])
    ids, mask = (x[row, :length].tolist() for x in (rollout.response_ids, rollout.response_mask))
    if response is not None and len(set(mask)) == 1:
        return [(mask[0], response)]
    spans = groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
    return [(own, vocabulary.decode([token for token, _ in span])) for own, span in spans]


def reward_row(
    prompts: Prompts,
    row: int,
    response: str,
    finish_reason: FinishReason,
    turns: Sequence[tuple[bool, str]],
    tokens: Sequence[str],
) -> dict[str, Any]:
    """Return a row as the reward gets it: the data's columns, the prompt and the response, whole,
    by turn and by sampled token."""
    return {
        **prompts.columns[row],
        "prompt": prompts.messages[row] or prompts.texts[row],
        "response": response,
        "finished": finish_reason not in CUT_OFF,
        "policy_turns": [text for own, text in turns if own],
        "observations": [text for own, text in turns if not own],
        "policy_tokens": list(tokens),
    }


class AskedRows(Sequence[dict[str, Any]]):
    """Rows of a rollout as the reward gets them, each made when it is asked for. Each process has
    its own, and text is decoded once in all."""

    def __init__(
        self, asked: Sequence[int], prompts: Prompts, rollout: Rollout, vocabulary: Vocabulary
    ) -> None:
        self.asked, self.prompts, self.rollout = asked, prompts, rollout
        self.vocabulary = vocabulary

    def __len__(self) -> int:
        return len(self.asked)

    @overload
    def __getitem__(self, at: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, at: slice) -> "AskedRows": ...

    def __getitem__(self, at: int | slice) -> "dict[str, Any] | AskedRows":
        if isinstance(at, slice):
            return AskedRows(self.asked[at], self.prompts, self.rollout, self.vocabulary)
        return _asked_row(self.prompts, self.rollout, self.asked[at], self.vocabulary)


def _asked_row(
    prompts: Prompts, rollout: Rollout, row: int, vocabulary: Vocabulary
) -> dict[str, Any]:
    """Return a row of a rollout as the reward gets it; an environment's rewards are among it."""
    response = response_text(rollout, row, vocabulary)
    given: dict[str, Any] = {}
    if rollout.turn_rewards:
        given["turn_rewards"] = rollout.turn_rewards[row]
    state = rollout.states[row] if rollout.states else None
    if state is not None:
        given["environments"] = asdict(state)
    sampled = rollout.response_ids[row][rollout.response_mask[row]].tolist()
    turns, reason = row_turns(rollout, row, vocabulary, response), rollout.finish_reasons[row]
    pieces = vocabulary.pieces(sampled)
    return {**reward_row(prompts, row, response, reason, turns, pieces), **given}


def _quoted(prompt: str, response: str) -> str:
    """Return the row's text, shortened to fit into a sentence."""
    return f"prompt {shortened(prompt)!r}, response {shortened(response)!r}"


def shortened(text: str) -> str:
    """Return at most `QUOTED` characters of a text."""
    return text if len(text) <= QUOTED else f"{text[:QUOTED]} …"


def score_rollout(
    prompts: Prompts, rollout: Rollout, context: ScoringContext, config: Config, iteration: int = 0
) -> tuple[Scores, list[Event]]:
    """Return the scores that rows are trained on, and an event for each row that is dropped.

    Under `bootstrap` a truncated response is not scored: the critic's value stands for what it
    would have earned, and a score would count that twice. Under `mask` it is scored, but neither
    loss nor baseline has it (DAPO's overlong filtering, Yu et al. 2025, arXiv 2503.14476).
    """
    bootstrapped = rollout.truncated & (config.advantage.truncation == "bootstrap")
    scores, events = score_responses(
        prompts,
        rollout,
        context,
        config,
        skip=bootstrapped,
        iteration=iteration,
        samples=config.rollout.samples_per_prompt,
    )
    masks = config.advantage.truncation == "mask"
    if masks:
        scores = replace(scores, usable=scores.usable & ~rollout.truncated)
    if not config.advantage.traits.by_group:
        return scores, events
    rows = rollout.rows
    lonely = rows_without_group(scores.usable, config.rollout.samples_per_prompt, rows)
    if masks:  # the others may be scored, and count in the mean score
        return replace(scores, usable=scores.usable & ~lonely), events
    alone = [
        Event("lonely_row", "no other row of its group was scored", rows.number(row))
        for row in lonely.nonzero().squeeze(1).tolist()
    ]
    return scores.without(lonely), [*events, *events_of_all(alone, rows)]


def shape_overlong(scores: Scores, rollout: Rollout, config: Config) -> Scores:
    """Add the penalty of `reward.overlong` to the scores, and as a part of its own."""
    settings = config.reward.overlong
    if settings is None:
        return scores
    most = settings.max_tokens or config.rollout.max_response_tokens
    dtype = scores.values.dtype
    lengths = rollout.response_lengths.to(scores.values.device)
    penalty = overlong_penalty(lengths, most, settings.buffer_tokens, dtype)
    penalty = torch.where(scores.scored, settings.penalty * penalty, 0.0)
    placed = scores.token_values
    if placed is not None:
        placed = placed + place_scores(penalty, rollout.response_mask)
    return replace(
        scores,
        values=scores.values + penalty,
        parts={**scores.parts, OVERLONG: penalty},
        token_values=placed,
    )


def weighted_parts(scores: Scores, config: Config) -> list[WeightedReward]:
    """Return the named rewards with their weights, where the estimator needs them."""
    if not config.advantage.traits.needs_parts:
        return []
    missing = [part.name for part in config.reward.parts or () if part.name not in scores.parts]
    if missing:
        raise UserError(
            f"The reward gave no part {missing[0]!r}, which reward.parts names and "
            f"advantage.estimator {config.advantage.estimator} needs."
        )
    return [WeightedReward(p.weight, scores.parts[p.name]) for p in config.reward.parts or ()]


def score_responses(
    prompts: Prompts,
    rollout: Rollout,
    context: ScoringContext,
    config: Config,
    skip: Bool[Tensor, " rows"] | None = None,
    iteration: int = 0,
    samples: int = 1,
) -> tuple[Scores, list[Event]]:
    """Return one score per row; a row that could not be scored is unusable and has an event.

    Neighbours are `samples` rows of one prompt.

    Rows that `skip` (rows) marks are not scored, and stay usable. Events are those of the rows of
    all processes. Raises `RunStopped` where more than `reward.max_failed_share` of all rows fail.
    """
    of_all = rollout.rows
    skipped = set() if skip is None else set(skip.nonzero().squeeze(1).tolist())
    asked = [row for row in range(len(prompts)) if row not in skipped]

    def rows(numbers: Sequence[int]) -> AskedRows:
        return AskedRows(numbers, prompts, rollout, context.vocabulary)

    def quoted(row: int) -> str:
        return _quoted(prompts.texts[row], response_text(rollout, row, context.vocabulary))

    def batch(numbers: Sequence[int]) -> Batch:
        return Batch([of_all.number(row) for row in numbers], iteration, samples)

    verdicts = context.reward.score(rows(asked), batch(asked))
    earned = None
    if any(of_all.together([bool(skipped)])):
        left = sorted(skipped)
        earned = context.reward.earned(rows(left), batch(left))
    if earned is not None:  # rewards of the turns before a response was cut off are its own
        verdicts, asked, skipped = [*verdicts, *earned], [*asked, *sorted(skipped)], set()
    failed = {row: v for row, v in zip(asked, verdicts, strict=True) if v.score is None}
    events = [
        Event("unscorable", f"{v.problem}; {quoted(row)}", of_all.number(row))
        for row, v in failed.items()
    ]
    events, total = events_of_all(events, of_all), of_all.count(prompts)
    if len(events) > config.reward.max_failed_share * total:
        raise RunStopped(
            f"{len(events)} of {total} rows could not be scored, more than "
            f"reward.max_failed_share = {config.reward.max_failed_share:g}; row {events[0].row}: "
            f"{events[0].message}.",
            events,
        )
    context.reward.accept()

    def by_row(numbers: list[float]) -> Float[Tensor, " rows"]:
        spread = torch.zeros(len(prompts), dtype=rollout.rollout_log_probs.dtype)
        spread[asked] = torch.tensor(numbers, dtype=spread.dtype)
        return spread.to(device)

    device = rollout.response_ids.device
    values = by_row([v.score or 0.0 for v in verdicts])
    own_names = dict.fromkeys(name for v in verdicts for name in v.parts)
    names = dict.fromkeys(of_all.together([*own_names]))
    parts = {name: by_row([v.parts.get(name, 0.0) for v in verdicts]) for name in names}
    usable = torch.ones(len(prompts), dtype=torch.bool)
    usable[list(failed)] = False
    scored = usable.clone()
    scored[list(skipped)] = False
    extras = {row: dict(v.extras) for row, v in zip(asked, verdicts, strict=True) if v.extras}
    placed = _place(dict(zip(asked, verdicts, strict=True)), values, rollout)
    return Scores(values, usable.to(device), scored.to(device), parts, extras, placed), events


def _place(
    verdicts: Mapping[int, Verdict], values: Float[Tensor, " rows"], rollout: Rollout
) -> Float[Tensor, "rows response"] | None:
    """Return the token that each number of each row belongs to (rows x response), by its verdict;
    None where every score, also of other processes, is for the response as a whole."""
    by_token = {row: v.reward for row, v in verdicts.items() if v.reward is not None}
    if not any(rollout.rows.together([bool(by_token)])):
        return None
    placed = place_scores(values, rollout.response_mask)
    for row, reward in by_token.items():
        sampled = rollout.response_mask[row].nonzero().squeeze(1).tolist()
        numbers = [0.0] * placed.shape[1]
        for column, number in zip(sampled, reward.tokens, strict=False):
            numbers[column] += number
        for column, number in zip(turn_ends(sampled), reward.turns, strict=False):
            numbers[column] += number
        if sampled:
            numbers[sampled[-1]] += reward.response
        placed[row] = torch.tensor(numbers, dtype=placed.dtype)
    return placed


def turn_ends(sampled: Sequence[int]) -> list[int]:
    """Return the last column of each turn, from the columns that the policy sampled: a turn is a
    run of neighbours."""
    return [
        column
        for column, following in zip(sampled, [*sampled[1:], None], strict=False)
        if following != column + 1
    ]


def score_record(scores: Scores, row: int) -> dict[str, Any]:
    """Return a row's score as the run's files hold it: null where there is none."""
    extras = {"score_extras": scores.extras[row]} if row in scores.extras else {}
    if not scores.scored[row]:
        return {"score": None, "score_parts": {}, **extras}
    parts = {name: shortest_floats(numbers[row][None])[0] for name, numbers in scores.parts.items()}
    score = shortest_floats(scores.values[row][None])[0]
    return {"score": score, "score_parts": parts, **extras}


def rows_without_group(
    usable: Bool[Tensor, " rows"], samples: int, rows: Rows = ALL_HERE
) -> Bool[Tensor, " rows"]:
    """Mark usable rows (rows) whose group of `samples` has no other usable row to compare with."""
    counts = rows.everyone(usable).view(-1, samples).sum(dim=1).repeat_interleave(samples)
    return usable & (rows.own(counts) < 2)


def score_greedy(
    prompts: Prompts, rows: Rows, roles: Roles, config: Config, iteration: int = 0
) -> Float[Tensor, " rows"]:
    """Return the score of the greedy response to each row's prompt (rows): ReMax's baseline
    (Li et al., arXiv 2310.10505). It is 0 where the estimator does not need it.

    A greedy response that cannot be scored is a baseline of 0, which is unbiased too.
    """
    device, samples = roles.actor.model.device, config.rollout.samples_per_prompt
    if not config.advantage.traits.needs_greedy:
        return torch.zeros(len(prompts), device=device)
    first = [row for row in range(len(prompts)) if rows.number(row) % samples == 0]
    once, with_first = prompts.select(first), rows.select(torch.tensor(first, dtype=torch.long))
    numbers = None if rows is ALL_HERE else [with_first.number(i) for i in range(len(first))]
    episodes = all_or_error(lambda: roles.episodes(once))
    sampling = begin(roles.sampler, episodes, Greedy(), numbers)
    rollout = replace(sampling.result(), rows=with_first)
    scores, _ = score_responses(once, rollout, roles, config, iteration=iteration)
    return rows.own(with_first.everyone(scores.values).repeat_interleave(samples))


NUM_TRIED = 3  # prompts that a reward is tried on before training
ANSWERS = ("answer", "ground_truth", "solution", "target")  # columns that often hold one
MADE_UP = "Hello."


@dataclass(frozen=True)
class Trial:
    """What the reward said of one response before training."""

    where: str
    response: str
    verdict: Verdict

    @property
    def result(self) -> str:
        """The score as text."""
        return "no score" if self.verdict.score is None else f"{self.verdict.score:g}"

    @property
    def why(self) -> str:
        """The response that was scored, and what went wrong."""
        problem = "" if self.verdict.problem is None else f": {self.verdict.problem}"
        made_up = "made-up " if self.response == MADE_UP else ""
        return f"for the {made_up}response {shortened(self.response)!r}{problem}"


def try_reward(scorer: Scorer, prompts: Prompts, config: Config) -> list[Trial]:
    """Return what the reward says to a few prompts; nothing for a reward model, which runs no code
    of the user's, and for an environment, which rewards only what was played."""
    if scorer.networks() or isinstance(scorer, EnvironmentScorer):
        return []
    responses = [_response(columns) for columns in prompts.columns]
    rows = spread(len(prompts))
    own = of_rows(rows, range(len(prompts)))
    asked = [
        reward_row(prompts, row, responses[row], "eos", [(True, responses[row])], [responses[row]])
        for row in own
    ]
    verdicts = rows.gather(scorer.score(asked, Batch(own)))
    places = [
        f"{file}, row {position + 1}"
        for file, position in zip(prompts.files, prompts.positions, strict=True)
    ]
    if verdicts and all(verdict.wrong_type for verdict in verdicts):
        raise UserError(
            f"The reward {config.reward.label} does not work: {verdicts[0].problem}; return a "
            f"number, or None for no opinion."
        )
    return [Trial(*found) for found in zip(places, responses, verdicts, strict=True)]


def _response(columns: Mapping[str, Any]) -> str:
    """Return the row's right answer, if some column holds one, or else a made-up response."""
    for name in ANSWERS:
        answer = columns.get(name)
        if isinstance(answer, dict):
            answer = answer.get("target")
        if isinstance(answer, list) and answer:
            answer = answer[0]
        if isinstance(answer, str | int | float):
            return str(answer)
    return MADE_UP
