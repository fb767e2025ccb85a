"""The result of one iteration: its tensors, metrics, events and timings."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tether.algo.advantages import zero_spread
from tether.algo.kl import adaptive_beta, k1
from tether.algo.masked import explained_variance, masked_sum
from tether.config import Config, PenaltyUpdate
from tether.config.algorithm import AnyUpdate
from tether.data.curriculum import Curriculum
from tether.errors import RunStopped
from tether.ppo.experience import record_mismatch
from tether.ppo.updates.minibatches import UpdateReport, merged_meters
from tether.run.metrics import Event, Last, Max, Mean, Meter, events_of_all
from tether.types import CUT_OFF, Experience, Moments, Prompts, Rollout, Scores


@dataclass(frozen=True)
class Controls:
    """The coefficients that controllers move from one iteration to the next."""

    beta: float  # weight of the KL to the reference in the reward
    penalty_coef: float  # weight of the KL to the old policy in PPO-Penalty's loss
    prompts_drawn: int = 0  # of the data so far, where dynamic sampling draws varying numbers
    curriculum: Curriculum | None = None  # what is known of each prompt, by `data.curriculum`

    def applied_to(self, update: AnyUpdate) -> AnyUpdate:
        """Return the update with the coefficient of this iteration in place of the first one."""
        if isinstance(update, PenaltyUpdate):
            return update.model_copy(update={"coef": self.penalty_coef})
        return update


def sampling_version(iteration: int, lag: int) -> int:
    """Return the version of the weights that sample an iteration's rows: `rollout.lag` behind.

    Version n is the weights after n iterations.
    """
    return max(0, iteration - lag)


def first_controls(config: Config) -> Controls:
    """Return the coefficients of the first iteration."""
    update = config.actor.update
    penalty_coef = update.coef if isinstance(update, PenaltyUpdate) else 0.0
    return Controls(beta=config.kl.in_reward.coef, penalty_coef=penalty_coef)


def next_beta(beta: float, metrics: Mapping[str, float], rows: int, config: Config) -> float:
    """Return beta for the next iteration, by the KL of the one that used `beta`."""
    kl = config.kl.in_reward
    if kl.controller == "fixed" or not config.kl.needs_reference:
        return beta
    return adaptive_beta(beta, metrics[f"kl/{kl.unit}_mean"], kl.target, rows, kl.horizon)


FEWEST_CALLS = 8  # per iteration; with fewer, a share of failures says nothing about a tool


@dataclass
class Clock:
    """Measures the seconds of each stage of an iteration."""

    seconds: dict[str, float] = field(default_factory=dict)
    last: float = field(default_factory=time.perf_counter)

    def lap(self, stage: str) -> None:
        """Add the time since the last lap to this stage."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self.last
        self.last = now


@dataclass(frozen=True)
class DroppedGroups:
    """What dynamic sampling sampled and left out: the rows that are not trained on."""

    rounds: int
    prompts: int  # drawn in all, with those that are trained on
    without_spread: int  # of them
    # Of this process:
    scores: Float[Tensor, " dropped"]
    scored: Bool[Tensor, " dropped"]
    kl_per_row: Mean  # to the reference; empty unless a controller needs it
    kl_per_token: Mean
    all_scores: Float[Tensor, " scored"]  # those that there are, of all processes
    kl_rows: int  # that `kl_per_row` is of, likewise

    def record(self, meter: Meter) -> None:
        """Record how much was sampled for this batch."""
        meter.record("rollout/rounds", Last(self.rounds))
        meter.record("rollout/prompts_drawn", Last(self.prompts))
        meter.record("rollout/no_spread_share", Mean(self.without_spread, self.prompts))


@dataclass(frozen=True)
class Outcome:
    """What an iteration computed, for metrics, rollout files and trace."""

    iteration: int
    controls: Controls
    prompts: Prompts
    rollout: Rollout
    scores: Scores
    greedy_scores: Float[Tensor, " rows"]  # 0 unless the estimator needs them
    experience: Experience
    moments: Moments
    actor: UpdateReport
    critic: UpdateReport
    events: list[Event]
    seconds: Mapping[str, float]
    dropped: DroppedGroups | None = None  # by dynamic sampling
    drawn: list[int] | None = None  # by the curriculum: which training prompts

    @property
    def no_progress(self) -> bool:
        """Whether a role took no step because of numbers that were not finite."""
        lost = any(event.kind.startswith("non_finite") for event in self.events)
        return lost and any(
            report.attempted and not report.steps_taken for report in (self.actor, self.critic)
        )

    def metrics(self, config: Config) -> dict[str, float]:
        """Return the deterministic numbers of this iteration, in data-flow order.

        What is a mean or an extreme is of this process's rows, until the meters are merged; the
        others are of all rows.
        """
        e, usable, all_rows = self.experience, self.scores.usable, self.experience.rows
        mask, tokens, rows = e.response_mask, e.response_mask.sum(), usable.sum()
        scores = self.scores.values
        differences = (e.old_log_probs - self.rollout.rollout_log_probs).abs()
        ended = sum(reason not in CUT_OFF for reason in self.rollout.finish_reasons)

        meter = Meter()
        scored, dropped = self.scores.scored, self.dropped
        sampled = all_rows.everyone(scores)[all_rows.everyone(scored)]
        meter.record("score/mean", Mean(scores.sum(), scored.sum()))
        if dropped is not None:  # the mean score is that of all rows that were sampled
            meter.record("score/mean", Mean(dropped.scores.sum(), dropped.scored.sum()))
            sampled = torch.cat([sampled, dropped.all_scores])
        meter.record("score/std", Last(sampled.std() if len(sampled) > 1 else 0.0))
        for name, numbers in self.scores.parts.items():
            meter.record(f"score/part/{name}", Mean(numbers.sum(), scored.sum()))
        meter.record("response/length_mean", Mean(mask.sum(), rows))
        meter.record("response/eos_rate", Mean(ended, len(usable)))
        if config.rollout.is_multi_turn:
            observed = self.rollout.response_lengths.sum() - self.rollout.response_mask.sum()
            meter.record("tools/calls_mean", Mean(calls_made(self.rollout), len(usable)))
            meter.record(
                "tools/invalid_mean", Mean(calls_at_fault(self.rollout, "policy"), len(usable))
            )
            meter.record("tools/observed_tokens_mean", Mean(observed, len(usable)))
        if config.rollout.lag:
            lag = self.iteration - sampling_version(self.iteration, config.rollout.lag)
            meter.record("rollout/lag", Last(lag))
        largest = torch.where(mask, differences, 0.0).amax(dim=1)
        meter.record("rollout/log_prob_diff_max", Max(all_rows.everyone(largest).max()))
        if config.may_mismatch:
            record_mismatch(meter, self.rollout, e, config)
        if config.kl.needs_reference:
            kl = k1(e.old_log_probs, e.ref_log_probs, mask).sum()
            meter.record("kl/token_mean", Mean(kl, tokens))
            meter.record("kl/sequence_mean", Mean(kl, rows))
            if dropped is not None:
                meter.record("kl/token_mean", dropped.kl_per_token)
                meter.record("kl/sequence_mean", dropped.kl_per_row)
            meter.record("kl/coef", Last(self.controls.beta))
        meter.record("reward/mean", Mean(e.token_level_rewards.sum(), rows))
        meter.record("advantage/mean", Last(self.moments.mean))
        meter.record("advantage/std", Last(self.moments.variance.sqrt()))
        if config.advantage.traits.by_group:
            samples = config.rollout.samples_per_prompt
            alike, usable_groups = (
                zero_spread(scores, mask, samples, all_rows).sum(),
                all_rows.everyone(mask.any(dim=1)).view(-1, samples).any(dim=1).sum(),
            )
            meter.record("advantage/zero_spread_share", Mean(alike, usable_groups))
        if config.has_critic:
            explained = explained_variance(e.values, e.returns, mask, all_rows)
            meter.record("value/mean", Mean(masked_sum(e.values, mask), tokens))
            meter.record("critic/explained_variance", Last(explained))
        if dropped is not None:
            dropped.record(meter)
        curriculum = self._next_curriculum()
        if curriculum is not None:
            for name, share in curriculum.metrics().items():
                meter.record(name, Last(share))
        if isinstance(config.actor.update, PenaltyUpdate):
            meter.record("actor/penalty_coef", Last(self.controls.penalty_coef))
        meter = merged_meters(meter)
        return {**meter.values(), **self.critic.meter.values(), **self.actor.meter.values()}

    def next_controls(self, metrics: Mapping[str, float], config: Config) -> Controls:
        """Return the coefficients for the next iteration."""
        rows = int(self.experience.rows.sum(self.scores.usable.sum()))
        if self.dropped is not None:
            rows += self.dropped.kl_rows
        coef = self.actor.penalty_coef
        return Controls(
            beta=next_beta(self.controls.beta, metrics, rows, config),
            penalty_coef=self.controls.penalty_coef if coef is None else coef,
            prompts_drawn=self.controls.prompts_drawn
            + (self.dropped.prompts if self.dropped else 0),
            curriculum=self._next_curriculum(),
        )

    def _next_curriculum(self) -> Curriculum | None:
        curriculum, drawn = self.controls.curriculum, self.drawn
        if curriculum is None or drawn is None:
            return None
        values, scored = map(
            self.experience.rows.everyone, (self.scores.values, self.scores.scored)
        )
        return curriculum.after(self.iteration, drawn, values, scored)

    def timings(self) -> dict[str, float]:
        """Return seconds per stage and tokens per second: what differs from machine to machine."""
        total = sum(self.seconds.values())
        rows, lengths = self.experience.rows, self.rollout.response_lengths
        tokens = int(rows.everyone(lengths).sum())
        tools = sum(call.seconds for calls in self.rollout.calls for call in calls)
        has_calls, in_tools = zip(*rows.together([(bool(self.rollout.calls), tools)]), strict=True)
        return {
            **{f"time/{stage}": seconds for stage, seconds in self.seconds.items()},
            "time/iteration": total,
            **({"time/tools": sum(in_tools)} if any(has_calls) else {}),
            "throughput/tokens_per_second": tokens / total,
        }


def calls_made(rollout: Rollout) -> int:
    """Count the calls that reached a tool, failed or not."""
    return sum(call.fault != "policy" for calls in rollout.calls for call in calls)


def calls_at_fault(rollout: Rollout, whose: str) -> int:
    """Count the failed calls whose fault is the policy's or the tool's."""
    return sum(call.fault == whose for calls in rollout.calls for call in calls)


def call_events(rollout: Rollout) -> list[Event]:
    """Return an event for each row, of all processes, with a call that a tool failed."""
    failed = {
        row: [f"{call.name}: {call.error}" for call in calls if call.fault == "tool"]
        for row, calls in enumerate(rollout.calls)
    }
    events = [
        Event("tool_failed", "; ".join(dict.fromkeys(errors)), rollout.rows.number(row))
        for row, errors in failed.items()
        if errors
    ]
    return events_of_all(events, rollout.rows)


def refuse_failing_tools(rollout: Rollout, config: Config) -> None:
    """Stop the run if tools or environments fail more often than `rollout.max_failed_share`.

    From failing tools the policy would learn not to use them.
    """
    found = rollout.rows.together([(calls_made(rollout), calls_at_fault(rollout, "tool"))])
    calls, failed = (sum(counts) for counts in zip(*found, strict=True))
    limit = config.rollout.max_failed_share
    if calls >= FEWEST_CALLS and failed > limit * calls:
        events = call_events(rollout)
        raise RunStopped(
            f"{failed} of {calls} calls failed, more than rollout.max_failed_share = {limit:g}; "
            f"row {events[0].row}: {events[0].message}.",
            events,
        )


def moments_events(moments: Moments, config: Config) -> list[Event]:
    """Return an event if fewer than two cells count: without a spread they are only centred."""
    if not config.advantage.whitens or int(moments.count) >= 2:
        return []
    return [Event("not_whitened", f"{int(moments.count)} cells count; they were centred only")]
