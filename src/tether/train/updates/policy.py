"""The policy update in minibatches: PPO-Clip with an entropy bonus."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tether.algo.aggregation import token_count, token_mean
from tether.algo.kl import k3
from tether.algo.losses import clip_policy_loss
from tether.algo.masked import masked_sum
from tether.config import Config
from tether.run.metrics import Level, Max, Mean
from tether.train.roles import Roles
from tether.train.updates.minibatches import row_slices, split_minibatch
from tether.train.updates.report import Report
from tether.types import Experience


@dataclass
class PolicyReport(Report):
    new_log_probs: Float[Tensor, "rows response"] | None = None  # each row's last forward


def update_actor(
    experience: Experience, roles: Roles, config: Config, iteration: int
) -> PolicyReport:
    settings, optimizer = config.actor, roles.actor_optimizer
    report = PolicyReport(new_log_probs=torch.zeros_like(experience.old_log_probs))
    slices = row_slices(
        len(experience), settings.minibatch_rows, settings.epochs, config.seed, "actor", iteration
    )
    for rows in slices:
        count = token_count(experience.response_mask[rows])
        for micro_rows, batch in split_minibatch(experience, rows, settings.microbatch_tokens):
            mask = batch.response_mask
            new_log_probs, entropies = roles.actor.evaluate(batch.sequences, mask)
            policy = clip_policy_loss(
                new_log_probs,
                batch.old_log_probs,
                batch.policy_advantages,
                settings.update.eps_low,
                settings.update.eps_high,
            )
            pg_loss = token_mean(policy.per_token, mask, count)
            entropy = token_mean(entropies, mask, count)
            (pg_loss - settings.entropy_coef * entropy).backward()

            report.new_log_probs[micro_rows, : mask.shape[1]] = new_log_probs.detach()
            tokens = mask.sum()
            old_to_new = k3(batch.old_log_probs, new_log_probs.detach(), mask)
            record = report.meter.record
            record("actor/pg_loss", Mean(masked_sum(policy.per_token.detach(), mask), tokens))
            record("actor/pg_clipfrac", Mean((policy.clipped & mask).sum(), tokens))
            record("actor/entropy", Mean(masked_sum(entropies.detach(), mask), tokens))
            record("actor/approx_kl", Mean(old_to_new.sum(), tokens))
            record("actor/ratio_max", Max(torch.where(mask, policy.ratio, 0.0).max()))
        norm = optimizer.step()
        if norm.isfinite():
            report.meter.record("actor/grad_norm", Mean(norm, 1))
        else:
            report.dropped_step("actor", norm)
    report.meter.record("actor/lr", Level(optimizer.adam.param_groups[0]["lr"]))
    return report
