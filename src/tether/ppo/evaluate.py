"""Evaluate a policy on held-out prompts: greedy and sampled scores, with intervals."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tether.algo.kl import k1
from tether.config import Config
from tether.data.batching import join
from tether.data.prompts import PromptSet, load_prompts
from tether.errors import UserError
from tether.models.vocabulary import Vocabulary, load_vocabulary_without_model
from tether.ppo.probe import ProbeResult
from tether.ppo.result import call_events, calls_made, refuse_failing_tools
from tether.ppo.roles import Roles, build_scorer, pick_device
from tether.ppo.scoring import ScoringContext, response_texts, score_record, score_responses
from tether.rewards.functions import Reward, columns_for_reward
from tether.rewards.scorers import Scorer
from tether.rollout.engine import EngineSampler
from tether.rollout.environments.episodes import told_prompts
from tether.rollout.openai import OpenAIEngine
from tether.rollout.sampler import Draw, Episodes, Greedy, Sampler
from tether.rollout.tools.build import build_episode_source
from tether.run.directory import EVALS
from tether.run.metrics import Event
from tether.run.reader import read_lines
from tether.run.writer import shown_columns
from tether.support import html
from tether.types import Prompts, Rollout, Scores

Z95 = 1.959964  # the standard normal's 97.5% point


@dataclass(frozen=True)
class Estimate:
    """A mean score with its 95% interval."""

    mean: float
    low: float
    high: float
    count: int
    binary: bool  # every score was 0 or 1, so the mean is a share

    @property
    def has_interval(self) -> bool:
        """Whether the interval has bounds: one score that is not 0 or 1 has none."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Estimate":
        """Return the estimate of a line. Infinite bounds are null there: JSON has no infinity."""
        unbounded = {"low": -math.inf, "high": math.inf}
        bounds = {name: record[name] for name in unbounded if record[name] is not None}
        found = cls(**{**record, **unbounded, **bounds})
        if not isinstance(found.mean, float | int):
            raise TypeError("the mean is not a number")
        return found

    def __str__(self) -> str:
        """Return the mean with its interval: of 0/1 scores as percentages."""
        low, mean, high = (
            f"{x:.1%}" if self.binary else f"{x:.3f}" for x in (self.low, self.mean, self.high)
        )
        return f"{mean} ({low} – {high})" if self.has_interval else mean

    def apart_from(self, other: "Estimate") -> bool:
        """Return whether the two intervals do not overlap."""
        return self.low > other.high or other.low > self.high


@dataclass(frozen=True)
class Evaluation:
    """Greedy and sampled scores after so many iterations."""

    iteration: int
    greedy: Estimate
    sampled: Estimate
    kl: float | None  # mean KL to the reference of a sampled response, in nats
    calls: float | None = None  # of tools that a sampled response made; None without tools
    probe: ProbeResult | None = None  # of `train.probe`, before and after a run
    # One object per prompt with both responses; empty in an evaluation read from a file.
    responses: list[dict[str, Any]] = field(default_factory=list, repr=False, compare=False)

    def record(self) -> dict[str, Any]:
        """Return the line of evals.jsonl; the responses go into a file of their own."""
        line = asdict(replace(self, responses=[]), dict_factory=_without_responses)
        return line if self.probe else {k: v for k, v in line.items() if k != "probe"}

    def summary(self) -> dict[str, str]:
        """Return the scores and the KL as texts, for a table."""
        found = {"sampled": str(self.sampled), "greedy": str(self.greedy)}
        return found if self.kl is None else {**found, "KL": f"{self.kl:.3f}"}

    def _repr_html_(self) -> str:
        rows = [["held-out", f"after {self.iteration} iterations"], *self.summary().items()]
        return html.table(rows)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Evaluation":
        """Return the evaluation of a line of evals.jsonl."""
        greedy, sampled = (Estimate.from_record(record[name]) for name in ("greedy", "sampled"))
        probe = ProbeResult.from_record(record["probe"]) if "probe" in record else None
        return cls(record["iteration"], greedy, sampled, record["kl"], record.get("calls"), probe)


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
    iteration: int, prompts: Prompts, roles: Roles, config: Config
) -> tuple[Evaluation, list[Event]]:
    """Score one greedy and one sampled response per prompt.

    The random draws are the same at every evaluation. Returns the evaluation and an event for
    each response or tool call that failed.
    """
    roles.sampler.sync(roles.actor.model, iteration)
    responses = sample_responses(prompts, roles.sampler, roles.episodes, config)
    sampled = responses.sampled
    sequences, mask = roles.actor.with_lower_states(join(sampled)), sampled.response_mask
    old_log_probs = roles.actor.log_probs(sequences, mask)
    ref_log_probs = roles.reference.log_probs(sequences, mask, old_log_probs)
    kl = k1(old_log_probs, ref_log_probs, mask)
    mean_kl = float(kl.sum() / len(prompts)) if config.kl.needs_reference else None
    evaluation, events = score_evaluation(responses, roles, config, iteration)
    return replace(evaluation, kl=mean_kl), events


@dataclass(frozen=True)
class EvaluationResponses:
    """A greedy and a sampled response to each prompt."""

    prompts: Prompts
    greedy: Rollout
    sampled: Rollout


def sample_responses(
    prompts: Prompts, sampler: Sampler, episodes: Episodes, config: Config
) -> EvaluationResponses:
    """Sample a greedy and a random response to each prompt."""
    asked = episodes(prompts)
    greedy = sampler.run(asked, Greedy())
    sampled = sampler.run(episodes(prompts), Draw(config.seed, "evaluate", 0))
    return EvaluationResponses(told_prompts(prompts, asked), greedy, sampled)


def score_evaluation(
    responses: EvaluationResponses, context: ScoringContext, config: Config, iteration: int = 0
) -> tuple[Evaluation, list[Event]]:
    """Score both kinds of responses; return also an event for each failure."""
    prompts, greedy, sampled = responses.prompts, responses.greedy, responses.sampled
    for rollout in (greedy, sampled):
        refuse_failing_tools(rollout, config)
    greedy_scores, greedy_events = score_responses(
        prompts, greedy, context, config, iteration=iteration
    )
    sampled_scores, sampled_events = score_responses(
        prompts, sampled, context, config, iteration=iteration
    )
    evaluation = Evaluation(
        iteration=iteration,
        greedy=estimate(greedy_scores),
        sampled=estimate(sampled_scores),
        kl=None,
        calls=calls_made(sampled) / len(prompts) if config.rollout.is_multi_turn else None,
        responses=_response_records(
            iteration,
            prompts,
            {"greedy": (greedy, greedy_scores), "sampled": (sampled, sampled_scores)},
            context,
        ),
    )
    failed = [*call_events(greedy), *call_events(sampled)]
    return evaluation, [*failed, *greedy_events, *sampled_events]


def _response_records(
    iteration: int,
    prompts: Prompts,
    scored: Mapping[str, tuple[Rollout, Scores]],
    context: ScoringContext,
) -> list[dict[str, Any]]:
    """Return one object per held-out prompt: the response of each kind, and its score."""
    texts = {
        kind: response_texts(rollout, context.vocabulary) for kind, (rollout, _) in scored.items()
    }
    return [
        {
            "iteration": iteration,
            "row": row,
            "data_file": prompts.files[row],
            "data_line": prompts.positions[row] + 1,
            "prompt": prompts.texts[row],
            "columns": shown_columns(prompts.columns[row]),
            **{
                kind: {
                    "response": texts[kind][row],
                    "finish_reason": rollout.finish_reasons[row],
                    **score_record(scores, row),
                }
                for kind, (rollout, scores) in scored.items()
            },
        }
        for row in range(len(prompts))
    ]


def _without_responses(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in items if name != "responses"}


def estimate(scores: Scores) -> Estimate:
    """Return the mean score: with Wilson's interval for scores of 0 and 1, else a normal one."""
    values = scores.values[scores.scored].double()
    count = len(values)
    if count == 0:
        return Estimate(0.0, 0.0, 0.0, count=0, binary=False)
    mean = float(values.mean())
    binary = bool(((values == 0) | (values == 1)).all())
    if binary:
        low, high = wilson(mean, count)
    else:
        half = Z95 * float(values.std()) / math.sqrt(count) if count > 1 else math.inf
        low, high = mean - half, mean + half
    return Estimate(mean, low, high, count, binary)


def wilson(share: float, count: int) -> tuple[float, float]:
    """Return Wilson's score interval of a share (Wilson 1927); unlike the normal interval it stays
    inside 0 and 1."""
    scale = 1 + Z95**2 / count
    centre = share + Z95**2 / (2 * count)
    half = Z95 * math.sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2))
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


@dataclass(frozen=True)
class EndpointEvaluation:
    """What it takes to sample from an endpoint and to score its responses."""

    vocabulary: Vocabulary
    prompts: PromptSet
    episodes: Episodes
    reward: Scorer


def build_endpoint_evaluation(config: Config, reward: Reward | None = None) -> EndpointEvaluation:
    """Load the held-out prompts and the reward. Of `model.actor` only the tokenizer is read."""
    if config.data.heldout is None:
        raise UserError("data.heldout is not set, so there is nothing to evaluate on.")
    vocabulary = load_vocabulary_without_model(config.model.actor, config.model.hub)
    columns = columns_for_reward(config.reward, reward)
    turns = build_episode_source(config.rollout, vocabulary, config.data)
    prompts = load_prompts(
        config.data.heldout, config.data, vocabulary.tokenizer, columns, None, heldout=True
    )
    scorer = build_scorer(config, reward, prompts, pick_device(config.device))
    return EndpointEvaluation(
        vocabulary,
        prompts,
        turns.episodes,
        scorer,
    )


def evaluate_endpoint(
    endpoint: OpenAIEngine, here: EndpointEvaluation, config: Config
) -> Evaluation:
    """Score one greedy and one sampled response per prompt, as `evaluate` does for the actor."""
    rollout, prompts = config.rollout, here.prompts.first(config.train.eval_prompts)
    limits = rollout.max_response_tokens, rollout.temperature
    sampler = EngineSampler(endpoint, here.vocabulary.eos_ids, *limits)
    responses = sample_responses(prompts, sampler, here.episodes, config)
    evaluation, _ = score_evaluation(responses, here, config)
    return evaluation
