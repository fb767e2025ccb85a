"""Sample and score the rows of an iteration, in one round, or in several until enough groups have
responses that scored differently."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool
from torch import Tensor

from tether.algo.advantages import zero_spread
from tether.algo.kl import k1
from tether.config import Config
from tether.data.batching import concat_rollouts, concat_scores, join
from tether.dist.rows import joined_rows
from tether.errors import RunStopped
from tether.ppo.result import Clock, Controls, DroppedGroups, refuse_failing_tools
from tether.ppo.roles import Roles
from tether.ppo.scoring import score_rollout, shape_overlong
from tether.rollout.own_rows import OwnRows, begin_own
from tether.rollout.sampler import Draw
from tether.run.metrics import Event, Mean
from tether.types import ALL_HERE, Prompts, Rollout, Rows, Scores


@dataclass(frozen=True)
class Batch:
    """Scored responses to train on: those of this process. Rows of one prompt have neighbouring
    numbers."""

    prompts: Prompts
    rollout: Rollout
    scores: Scores
    events: list[Event]
    dropped: DroppedGroups | None = None  # by dynamic sampling; None where there is none
    drawn: list[int] | None = None  # by the curriculum: which training prompts; None without one


@dataclass(frozen=True)
class Asked:
    """All responses to an iteration's prompts, which are being sampled or wait to be scored."""

    iteration: int
    rows: OwnRows


def sample_batch(
    iteration: int, controls: Controls, roles: Roles, config: Config, clock: Clock
) -> Batch:
    """Sample a response to each row's prompt and score it: prompts follow in the data's order, or
    by `data.curriculum`, or until the batch is full by `rollout.dynamic_sampling`."""
    roles.sampler.sync(roles.actor.model, iteration)
    count = config.rollout.prompts
    if config.rollout.dynamic_sampling is not None:
        batch = _refill(iteration, controls.prompts_drawn, roles, config, clock)
    elif controls.curriculum is not None:
        drawn = controls.curriculum.draw(iteration, count, config.seed)
        prompts = roles.train_prompts.rows(drawn)
        batch = _round(iteration, prompts, "token", roles, config, clock)
        batch = replace(batch, drawn=drawn)
    else:
        return score_batch(ask_batch(iteration, roles, config), roles, config, clock)
    return replace(batch, scores=shape_overlong(batch.scores, batch.rollout, config))


def _window(start: int, count: int, roles: Roles, config: Config) -> Prompts:
    """Return `count` prompts of the stream from `start` on."""
    return roles.train_prompts.window(start, count, config.seed, config.data.shuffle)


def _round(
    iteration: int, prompts: Prompts, purpose: str, roles: Roles, config: Config, clock: Clock
) -> Batch:
    """Sample and score all responses to each prompt."""
    asked = _ask(iteration, prompts, purpose, roles, config)
    return _score(asked, roles, config, clock)


def _ask(iteration: int, prompts: Prompts, purpose: str, roles: Roles, config: Config) -> Asked:
    prompts = prompts.repeat(config.rollout.samples_per_prompt)
    choice = Draw(config.seed, purpose, iteration)
    return Asked(iteration, begin_own(roles.sampler, roles.episodes, prompts, choice))


def _score(asked: Asked, roles: Roles, config: Config, clock: Clock) -> Batch:
    prompts, rollout = asked.rows.prompts, asked.rows.result()
    refuse_failing_tools(rollout, config)
    clock.lap("rollout")
    scores, events = score_rollout(prompts, rollout, roles, config, asked.iteration)
    clock.lap("reward")
    return Batch(prompts, rollout, scores, events)


def ask_batch(iteration: int, roles: Roles, config: Config) -> Asked:
    """Begin to sample the rows of an iteration with the weights that the sampler was given last.
    Prompts follow in the data's order."""
    count = config.rollout.prompts
    prompts = _window(iteration * count, count, roles, config)
    return _ask(iteration, prompts, "token", roles, config)


def score_batch(asked: Asked, roles: Roles, config: Config, clock: Clock) -> Batch:
    """Wait for rows that were asked for, and score them."""
    batch = _score(asked, roles, config, clock)
    return replace(batch, scores=shape_overlong(batch.scores, batch.rollout, config))


def _refill(iteration: int, start: int, roles: Roles, config: Config, clock: Clock) -> Batch:
    """Sample further prompts in place of groups whose scores are all equal, until the batch is full
    or the rounds are used up.

    Such a group has no advantage, so the batch would be smaller than it looks, and ever smaller as
    prompts are solved. The spread is that of the raw scores: a penalty on length is not yet in
    them. Which prompts follow is given by the data's order alone.

    DAPO, Yu et al. 2025, arXiv 2503.14476, section 3.2.
    """
    settings, samples = config.rollout.dynamic_sampling, config.rollout.samples_per_prompt
    assert settings is not None
    wanted, size = config.rollout.prompts, settings.round_prompts or config.rollout.prompts
    rounds: list[Batch] = []
    spread: list[Tensor] = []
    while len(rounds) < settings.max_rounds and sum(map(_count, spread)) < wanted:
        purpose = f"token {len(rounds)}" if rounds else "token"
        prompts = _window(start + len(rounds) * size, size, roles, config)
        rounds.append(_round(iteration, prompts, purpose, roles, config, clock))
        last = rounds[-1]
        spread.append(groups_with_spread(last.scores, samples, last.rollout.rows))
    found = _joined(rounds)
    chosen = torch.cat(spread).nonzero().squeeze(1)[:wanted]
    if not len(chosen):
        raise RunStopped(
            f"None of {len(rounds) * size} prompts had responses that scored differently, in "
            f"rollout.dynamic_sampling.max_rounds = {len(rounds)} rounds of {size}, so there is "
            f"nothing left to learn from: all of them are solved, or none is. Use other prompts, "
            f"raise rollout.samples_per_prompt, or leave rollout.dynamic_sampling out.",
            found.events,
        )
    numbers = (chosen[:, None] * samples + torch.arange(samples)).flatten()
    rows = found.rollout.rows.here(numbers)
    left_out = torch.ones(len(found.prompts), dtype=torch.bool)
    left_out[rows] = False
    with_spread = sum(map(_count, spread))
    dropped = _dropped(found, left_out, len(rounds) * size, with_spread, len(rounds), roles, config)
    events = _renumbered(found.events, numbers.tolist())
    if len(chosen) < wanted:
        message = f"{len(chosen)} groups of {wanted} had a spread after {len(rounds)} rounds"
        events.append(Event("batch_not_filled", message))
    device, kept = found.scores.values.device, found.rollout.rows.select(rows)
    return Batch(
        found.prompts.select(rows.tolist()),
        replace(found.rollout.select(rows), rows=kept),
        found.scores.select(rows.to(device)),
        events,
        dropped,
    )


def groups_with_spread(
    scores: Scores, samples: int, rows: Rows = ALL_HERE
) -> Bool[Tensor, " groups"]:
    """Mark the groups with two usable rows whose scores differ (on the CPU).

    A row that the critic stands for has no score to compare, and counts as different.
    """
    usable = rows.everyone(scores.usable).view(-1, samples)
    alike = zero_spread(scores.values, scores.usable[:, None], samples, rows)
    unknown = rows.everyone(scores.usable & ~scores.scored).view(-1, samples).any(dim=1)
    return ((usable.sum(dim=1) >= 2) & (~alike | unknown)).cpu()


def _count(groups: Bool[Tensor, " groups"]) -> int:
    return int(groups.sum())


def _joined(rounds: Sequence[Batch]) -> Batch:
    """Put rounds one after the other, the rows of events with them."""

    def events() -> Iterator[Event]:
        before = 0
        for batch in rounds:
            for event in batch.events:
                yield event if event.row is None else replace(event, row=event.row + before)
            before += batch.rollout.rows.count(batch.prompts)

    rollout = concat_rollouts([batch.rollout for batch in rounds])
    return Batch(
        Prompts.concat([batch.prompts for batch in rounds]),
        replace(rollout, rows=joined_rows([batch.rollout.rows for batch in rounds])),
        concat_scores(
            [batch.scores for batch in rounds], [batch.rollout.response_mask for batch in rounds]
        ),
        list(events()),
    )


def _renumbered(events: Sequence[Event], rows: list[int]) -> list[Event]:
    """Give events the row numbers of the batch; those of rows that were left out have none."""
    place = {row: number for number, row in enumerate(rows)}
    return [
        event if event.row is None else replace(event, row=place.get(event.row)) for event in events
    ]


def _dropped(
    found: Batch,
    left_out: Bool[Tensor, " rows"],
    prompts: int,
    with_spread: int,
    rounds: int,
    roles: Roles,
    config: Config,
) -> DroppedGroups:
    """Count what was sampled and is not trained on: score/mean and the controller need it."""
    rows, all_rows, scores = left_out.nonzero().squeeze(1), found.rollout.rows, found.scores
    kl = tokens = Mean(0.0, 0)
    in_all = int(all_rows.everyone(left_out).sum())
    if in_all and config.kl.in_reward.controller == "adaptive" and config.kl.needs_reference:
        rollout = found.rollout.select(rows)
        usable = scores.usable[rows.to(scores.usable.device)]
        kl, tokens = _kl_of(rollout, usable, roles)
    here = left_out.to(scores.values.device)
    in_mean = all_rows.everyone(here & scores.scored)
    return DroppedGroups(
        rounds=rounds,
        prompts=prompts,
        without_spread=prompts - with_spread,
        scores=scores.values[here],
        scored=scores.scored[here],
        kl_per_row=kl,
        kl_per_token=tokens,
        all_scores=all_rows.everyone(scores.values)[in_mean],
        kl_rows=int(all_rows.sum(torch.as_tensor(kl.count, device=here.device))),
    )


def _kl_of(rollout: Rollout, usable: Bool[Tensor, " rows"], roles: Roles) -> tuple[Mean, Mean]:
    """Return the KL to the reference of rows that are not trained on, per row and per token."""
    mask = rollout.response_mask & usable[:, None]
    sequences = roles.actor.with_lower_states(join(rollout, roles.share_prompts))
    log_probs = roles.actor.log_probs(sequences, mask)
    kl = k1(log_probs, roles.reference.log_probs(sequences, mask, log_probs), mask)
    finite = torch.where(kl.isfinite(), kl, 0.0).sum()
    return Mean(finite, usable.sum()), Mean(finite, mask.sum())
