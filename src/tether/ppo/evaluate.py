"""Evaluate a policy on held-out prompts: greedy and sampled scores, with intervals."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tether.algo.kl import k1
from tether.config import Config
from tether.data.batching import join
from tether.data.prompts import HeldoutSets, load_heldout
from tether.dist.collectives import gather_replicas
from tether.errors import UserError
from tether.models.vocabulary import Vocabulary, load_vocabulary_without_model
from tether.ppo.estimates import Estimate, estimate, estimates_at_k
from tether.ppo.price import Price, price_of
from tether.ppo.probe import ProbeResult
from tether.ppo.result import call_events, calls_made, refuse_failing_tools
from tether.ppo.roles import Roles, build_scorer, pick_device
from tether.ppo.scoring import (
    ScoringContext,
    response_texts,
    row_turns,
    score_record,
    score_responses,
)
from tether.rewards.functions import Reward, columns_for_reward, parts_of
from tether.rewards.rules import ANSWERS_OF
from tether.rewards.scorers import InProcessScorer, Scorer
from tether.rollout.engine import EngineSampler
from tether.rollout.openai import OpenAIEngine
from tether.rollout.own_rows import everywhere, sample_own, scores_everywhere
from tether.rollout.sampler import Draw, Episodes, Greedy, Sampler
from tether.rollout.tools.build import build_episode_source
from tether.run.directory import EVALS
from tether.run.metrics import Event
from tether.run.reader import read_lines
from tether.run.writer import shown_columns
from tether.support import html
from tether.types import ALL_HERE, Prompts, Rollout, Scores


@dataclass(frozen=True)
class SetScores:
    """Scores on one of several sets of held-out prompts."""

    greedy: Estimate
    sampled: Estimate
    kl: float | None  # mean KL to the reference of a sampled response, in nats
    at_k: Mapping[str, Estimate] = field(default_factory=dict)  # pass@2, maj@2, …

    def summary(self) -> dict[str, str]:
        """Return the scores and the KL as texts, for a table."""
        found = {"sampled": str(self.sampled), "greedy": str(self.greedy)}
        found |= {name: str(value) for name, value in self.at_k.items()}
        return found if self.kl is None else {**found, "KL": f"{self.kl:.3f}"}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "SetScores":
        """Return the scores of a line of evals.jsonl, or of one set in it."""
        greedy, sampled = (Estimate.from_record(record[name]) for name in ("greedy", "sampled"))
        at_k = {k: Estimate.from_record(v) for k, v in record.get("at_k", {}).items()}
        return cls(greedy, sampled, record["kl"], at_k)


NOTHING_HELD_OUT = "data.heldout is not set, so there is nothing to evaluate on."
OPTIONAL = (
    "probe",
    "at_k",
    "sets",
    "price",
)  # what a line of evals.jsonl has only where it was asked for


@dataclass(frozen=True)
class Evaluation:
    """Greedy and sampled scores after so many iterations, over all held-out prompts."""

    iteration: int
    greedy: Estimate
    sampled: Estimate
    kl: float | None  # mean KL to the reference of a sampled response, in nats
    calls: float | None = None  # of tools that a sampled response made; None without tools
    probe: ProbeResult | None = None  # of `train.probe`, before and after a run
    # One object per prompt with its responses; empty in an evaluation read from a file.
    responses: list[dict[str, Any]] = field(default_factory=list, repr=False, compare=False)
    at_k: Mapping[str, Estimate] = field(default_factory=dict)  # with train.eval_samples
    sets: Mapping[str, SetScores] = field(default_factory=dict)  # by name, where data.heldout is
    price: Price | None = None  # with train.price_samples, after a run

    def record(self) -> dict[str, Any]:
        """Return the line of evals.jsonl; the responses go into a file of their own."""
        line = asdict(replace(self, responses=[]), dict_factory=_without_responses)
        return {k: v for k, v in line.items() if v or k not in OPTIONAL}

    def scores(self) -> SetScores:
        """Return the scores over all prompts."""
        return SetScores(self.greedy, self.sampled, self.kl, self.at_k)

    def summary(self) -> dict[str, str]:
        """Return the scores and the KL as texts, for a table."""
        return self.scores().summary()

    def _repr_html_(self) -> str:
        rows = [["held-out", f"after {self.iteration} iterations"], *self.summary().items()]
        for name, scores in self.sets.items():
            rows += [[f"{name}, {what}", text] for what, text in scores.summary().items()]
        return html.table(rows)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Evaluation":
        """Return the evaluation of a line of evals.jsonl."""
        every = SetScores.from_record(record)
        return cls(
            record["iteration"],
            every.greedy,
            every.sampled,
            every.kl,
            record.get("calls"),
            ProbeResult.from_record(record["probe"]) if "probe" in record else None,
            at_k=every.at_k,
            sets={k: SetScores.from_record(v) for k, v in record.get("sets", {}).items()},
            price=Price.from_record(record["price"]) if "price" in record else None,
        )


def read_evaluations(run: Path) -> list[Evaluation]:
    """Return the evaluations that a run has made so far."""
    found = []
    for number, record in enumerate(read_lines(run / EVALS), start=1):
        try:
            found.append(Evaluation.from_record(record))
        except (KeyError, TypeError, AttributeError):
            raise UserError(
                f"{run / EVALS}, line {number} is damaged: it is not an evaluation. Repair the "
                f"line, or remove it."
            ) from None
    return found


def evaluate(
    iteration: int, sets: Mapping[str, Prompts], roles: Roles, config: Config, priced: bool = False
) -> tuple[Evaluation, list[Event]]:
    """Score one greedy response and `train.eval_samples` sampled ones per prompt.

    The random draws are the same at every evaluation. With `priced`, the reference is sampled too,
    for the least KL of the score. Returns the evaluation and an event for each response or tool
    call that failed.
    """
    roles.sampler.sync(roles.actor.model, iteration)
    responses = sample_responses(sets, roles.sampler, roles.episodes, config)
    sampled = responses.sampled
    sequences, mask = roles.actor.with_lower_states(join(sampled)), sampled.response_mask
    old_log_probs = roles.actor.log_probs(sequences, mask)
    ref_log_probs = roles.reference.log_probs(sequences, mask, old_log_probs)
    kl = k1(old_log_probs, ref_log_probs, mask) if config.kl.needs_reference else None
    scored = score_both(responses, roles, config, iteration)
    if kl is not None and sampled.rows is not ALL_HERE:
        kl = sampled.rows.everyone(kl.sum(dim=1))[:, None]
    scored, responses = scored.everywhere(responses), responses.everywhere()
    evaluation = summarise(responses, scored, roles, config, iteration, kl)
    if priced and kl is not None:
        price = price_of(responses.prompts, scored.sampled, kl, roles, config)
        evaluation = replace(evaluation, price=price)
    return evaluation, scored.events


@dataclass(frozen=True)
class EvaluationResponses:
    """A greedy response to each prompt, and several sampled ones side by side."""

    sizes: Mapping[str, int]  # prompts by set, which follow each other
    prompts: Prompts  # of the greedy responses
    sampled_prompts: Prompts
    greedy: Rollout
    sampled: Rollout

    def everywhere(self) -> "EvaluationResponses":
        """Return the responses of all processes."""
        if self.greedy.rows is ALL_HERE:
            return self
        return EvaluationResponses(
            self.sizes,
            Prompts.concat(gather_replicas(self.prompts)),
            Prompts.concat(gather_replicas(self.sampled_prompts)),
            everywhere(self.greedy),
            everywhere(self.sampled),
        )


def sample_responses(
    sets: Mapping[str, Prompts], sampler: Sampler, episodes: Episodes, config: Config
) -> EvaluationResponses:
    """Sample a greedy response to each prompt, and `train.eval_samples` random ones; of several
    processes each to prompts of its own."""
    prompts = Prompts.concat([*sets.values()])
    told, greedy = sample_own(sampler, episodes, prompts, Greedy())
    repeated, choice = prompts.repeat(config.train.eval_samples), Draw(config.seed, "evaluate", 0)
    sampled_prompts, sampled = sample_own(sampler, episodes, repeated, choice)
    sizes = {name: len(some) for name, some in sets.items()}
    return EvaluationResponses(sizes, told, sampled_prompts, greedy, sampled)


@dataclass(frozen=True)
class ScoredResponses:
    """The scores of both kinds of responses, and an event for each failure."""

    greedy: Scores
    sampled: Scores
    events: list[Event]

    def everywhere(self, responses: EvaluationResponses) -> "ScoredResponses":
        """Return the scores of all processes."""
        return ScoredResponses(
            scores_everywhere(self.greedy, responses.greedy),
            scores_everywhere(self.sampled, responses.sampled),
            self.events,
        )


def score_both(
    responses: EvaluationResponses, context: ScoringContext, config: Config, iteration: int = 0
) -> ScoredResponses:
    """Score the greedy and the sampled responses."""
    samples = config.train.eval_samples
    for rollout in (responses.greedy, responses.sampled):
        refuse_failing_tools(rollout, config)
    greedy, greedy_events = score_responses(
        responses.prompts, responses.greedy, context, config, iteration=iteration
    )
    sampled, sampled_events = score_responses(
        responses.sampled_prompts,
        responses.sampled,
        context,
        config,
        iteration=iteration,
        samples=samples,
    )
    failed = [*call_events(responses.greedy), *call_events(responses.sampled)]
    return ScoredResponses(greedy, sampled, [*failed, *greedy_events, *sampled_events])


def summarise(
    responses: EvaluationResponses,
    scored: ScoredResponses,
    context: ScoringContext,
    config: Config,
    iteration: int = 0,
    kl: Float[Tensor, "rows response"] | None = None,
) -> Evaluation:
    """Return the mean scores over all prompts and by set; `kl` is that of the sampled responses."""
    samples, sampled = config.train.eval_samples, responses.sampled
    answers = answers_given(sampled, scored.sampled, context, config) if samples > 1 else None

    def scores_of(first: int, count: int) -> SetScores:
        """Return the scores of neighbouring prompts."""
        rows = range(first * samples, (first + count) * samples)
        some = scored.sampled.select(torch.tensor(rows))
        said = None if answers is None else answers[rows.start : rows.stop]
        return SetScores(
            estimate(scored.greedy.select(torch.arange(first, first + count))),
            estimate(some, samples),
            None if kl is None else float(kl[rows.start : rows.stop].sum() / len(rows)),
            estimates_at_k(some, samples, said),
        )

    sizes = [*responses.sizes.values()]
    starts = [0, *accumulate(sizes)]
    every = scores_of(0, len(responses.prompts))
    parts = [scores_of(*place) for place in zip(starts, sizes, strict=False)]
    calls = calls_made(sampled) / len(sampled.finish_reasons)
    return Evaluation(
        iteration=iteration,
        greedy=every.greedy,
        sampled=every.sampled,
        kl=every.kl,
        calls=calls if config.rollout.is_multi_turn else None,
        responses=_response_records(
            iteration,
            responses,
            {"greedy": (responses.greedy, scored.greedy), "sampled": (sampled, scored.sampled)},
            context,
            config,
        ),
        at_k=every.at_k,
        sets=dict(zip(responses.sizes, parts, strict=True)) if config.data.names_sets else {},
    )


def answers_given(
    sampled: Rollout, scores: Scores, context: ScoringContext, config: Config
) -> list[str | None] | None:
    """Return the answer of each response: what the reward said it is, under the name `answer`
    beside the score, else what a shipped rule compares. None where neither is known."""
    rows = range(len(sampled.finish_reasons))
    if any("answer" in said for said in scores.extras.values()):
        said = [scores.extras.get(row, {}).get("answer") for row in rows]
        return [None if answer is None else str(answer) for answer in said]
    kinds = [part.kind for part in parts_of(config.reward) if part.kind in ANSWERS_OF]
    if len(kinds) != 1 or isinstance(context.reward, InProcessScorer):
        return None
    turns = [row_turns(sampled, row, context.vocabulary) for row in rows]
    return [ANSWERS_OF[kinds[0]]([text for own, text in row if own]) for row in turns]


def _response_records(
    iteration: int,
    responses: EvaluationResponses,
    scored: Mapping[str, tuple[Rollout, Scores]],
    context: ScoringContext,
    config: Config,
) -> list[dict[str, Any]]:
    """Return one object per held-out prompt: the response of each kind, and its score.

    Of several samples `sampled` is the first, and `samples` has all.
    """
    prompts, samples = responses.prompts, config.train.eval_samples
    texts = {
        kind: response_texts(rollout, context.vocabulary) for kind, (rollout, _) in scored.items()
    }

    def response(kind: str, row: int) -> dict[str, Any]:
        rollout, scores = scored[kind]
        reason = rollout.finish_reasons[row]
        return {"response": texts[kind][row], "finish_reason": reason, **score_record(scores, row)}

    names = [name for name, size in responses.sizes.items() for _ in range(size)]
    lines = []
    for row in range(len(prompts)):
        sampled = [response("sampled", row * samples + i) for i in range(samples)]
        lines.append(
            {
                "iteration": iteration,
                "row": row,
                **({"set": names[row]} if config.data.names_sets else {}),
                "data_file": prompts.files[row],
                "data_line": prompts.positions[row] + 1,
                "prompt": prompts.texts[row],
                "columns": shown_columns(prompts.columns[row]),
                "greedy": response("greedy", row),
                "sampled": sampled[0],
                **({"samples": sampled} if samples > 1 else {}),
            }
        )
    return lines


def _without_responses(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in items if name != "responses"}


@dataclass(frozen=True)
class EndpointEvaluation:
    """What it takes to sample from an endpoint and to score its responses."""

    vocabulary: Vocabulary
    prompts: HeldoutSets
    episodes: Episodes
    reward: Scorer


def build_endpoint_evaluation(config: Config, reward: Reward | None = None) -> EndpointEvaluation:
    """Load the held-out prompts and the reward. Of `model.actor` only the tokenizer is read."""
    vocabulary = load_vocabulary_without_model(config.model.actor, config.model.hub)
    columns = columns_for_reward(config.reward, reward)
    # Before the prompts: a chat template may have to show the tools in each of them.
    turns = build_episode_source(config.rollout, vocabulary, config.data)
    prompts = load_heldout(config.data, vocabulary.tokenizer, columns)
    if prompts is None:
        raise UserError(NOTHING_HELD_OUT)
    scorer = build_scorer(config, reward, prompts.largest, pick_device(config.device))
    return EndpointEvaluation(
        vocabulary,
        prompts,
        turns.episodes,
        scorer,
    )


def evaluate_endpoint(
    endpoint: OpenAIEngine, here: EndpointEvaluation, config: Config
) -> Evaluation:
    """Score greedy and sampled responses to each prompt, as `evaluate` does for the actor."""
    rollout, sets = config.rollout, here.prompts.first(config.train.eval_prompts)
    limits = rollout.max_response_tokens, rollout.temperature
    sampler = EngineSampler(endpoint, here.vocabulary.eos_ids, *limits)
    responses = sample_responses(sets, sampler, here.episodes, config)
    return summarise(responses, score_both(responses, here, config), here, config)
