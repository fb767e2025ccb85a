"""The critic's update in minibatches: clipped squared error against the returns."""

from tether.algo.aggregation import token_count, token_mean
from tether.algo.losses import clip_value_loss
from tether.algo.masked import masked_sum
from tether.config import Config
from tether.run.metrics import Level, Mean
from tether.train.roles import Roles
from tether.train.updates.minibatches import row_slices, split_minibatch
from tether.train.updates.report import Report
from tether.types import Experience


def update_critic(experience: Experience, roles: Roles, config: Config, iteration: int) -> Report:
    settings, optimizer = config.critic, roles.critic_optimizer
    report = Report()
    slices = row_slices(
        len(experience), settings.minibatch_rows, settings.epochs, config.seed, "critic", iteration
    )
    for rows in slices:
        count = token_count(experience.response_mask[rows])
        for _, batch in split_minibatch(experience, rows, settings.microbatch_tokens):
            mask = batch.response_mask
            new_values = roles.critic(batch.sequences)[:, :-1]
            value = clip_value_loss(new_values, batch.values, batch.returns, settings.clip)
            token_mean(value.per_token, mask, count).backward()

            tokens = mask.sum()
            vf_loss = masked_sum(value.per_token.detach(), mask)
            report.meter.record("critic/vf_loss", Mean(vf_loss, tokens))
            report.meter.record("critic/vf_clipfrac", Mean((value.clipped & mask).sum(), tokens))
        norm = optimizer.step()
        if norm.isfinite():
            report.meter.record("critic/grad_norm", Mean(norm, 1))
        else:
            report.dropped_step("critic", norm)
    report.meter.record("critic/lr", Level(optimizer.adam.param_groups[0]["lr"]))
    return report
