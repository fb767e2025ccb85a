"""The price of a point: the KL that a policy spent beside the least that its score needs."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tether.algo.least_kl import least_kl, log_moments, tilts
from tether.algo.random import uniform
from tether.config import Config
from tether.ppo.estimates import Interval
from tether.ppo.roles import reference_rollout
from tether.ppo.scoring import ScoringContext, score_responses
from tether.rollout.own_rows import scores_everywhere
from tether.types import Prompts, Scores

RESAMPLED = 400  # times that the prompts are drawn again, for the intervals


@dataclass(frozen=True)
class Price:
    """Nats per response that a policy spent, and the least that any policy needs for its score."""

    spent: Interval
    least: Interval
    wasted: Interval  # share of what was spent: 1 - least / spent
    samples: int  # of the reference, per prompt
    never_right: float  # share of prompts whose reference samples all have the lowest score

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Price":
        """Return the price of a line of evals.jsonl. Infinite numbers are null there."""
        spent, least, wasted = (
            Interval(*(math.inf if record[name][x] is None else record[name][x] for x in BOUNDS))
            for name in ("spent", "least", "wasted")
        )
        return cls(spent, least, wasted, record["samples"], record["never_right"])

    def record(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        """Return one line for a person."""
        spent, least = (_nats(x) for x in (self.spent, self.least))
        if not math.isfinite(self.least.mean):
            return (
                f"KL spent {spent} nats; the least for this score cannot be told: no mixture of "
                f"{self.samples} reference samples per prompt scores as much"
            )
        wasted = ""
        if self.spent.low > 0:  # of nothing no share is wasted
            w = self.wasted
            wasted = f"; wasted {w.mean:.0%} ({w.low:.0%} – {w.high:.0%})"
        return f"KL spent {spent} nats, the least for this score {least}{wasted}"


BOUNDS = ("mean", "low", "high")


def _nats(x: Interval) -> str:
    return f"{x.mean:.3f} ({x.low:.3f} – {x.high:.3f})"


def price_of(
    prompts: Prompts,
    sampled: Scores,
    kl: Float[Tensor, "rows response"],
    context: ScoringContext,
    config: Config,
) -> Price:
    """Sample and score the reference on the prompts of an evaluation, and compare.

    `sampled` and `kl` are of the policy's own responses, `train.eval_samples` for each prompt.
    """
    samples, asked = config.train.price_samples, prompts.repeat(config.train.price_samples)
    own, rollout, _ = reference_rollout(config, asked, "price", kl.device)
    found, _ = score_responses(own, rollout, context, config, samples=samples)
    found = scores_everywhere(found, rollout)
    per_prompt = (len(prompts), -1)
    scored = sampled.scored.view(per_prompt).cpu()
    scores = torch.where(scored, sampled.values.view(per_prompt).cpu(), 0.0).double().sum(dim=1)
    return compare(
        scores / scored.sum(dim=1),
        kl.double().sum(dim=1).view(per_prompt).mean(dim=1).cpu(),
        found.select(torch.arange(len(asked))),
        samples,
        config.seed,
    )


def compare(
    scores: Float[Tensor, " prompts"],
    spent: Float[Tensor, " prompts"],
    reference: Scores,
    samples: int,
    seed: int,
) -> Price:
    """Return the price from a policy's mean score and KL per prompt, and the reference's scores,
    `samples` for each prompt.

    Prompts without a score, or with fewer than two of the reference, are left out. The intervals
    are those of the middle 95% of what prompts drawn again with replacement give, so they hold
    the noise of scores, KL and reference samples together.
    """
    values, known = (x.cpu().view(-1, samples) for x in (reference.values, reference.scored))
    usable = scores.isfinite() & (known.sum(dim=1) >= 2)
    scores, spent, values, known = (x[usable] for x in (scores, spent, values.double(), known))
    count = len(scores)
    etas = tilts(values)
    moments = log_moments(values, known, etas)
    rows = np.arange(RESAMPLED)[:, None], np.arange(count)
    drawn = (uniform(seed, "price again", *rows) * count).long().clamp(max=count - 1)
    weights = torch.zeros(RESAMPLED, count, dtype=torch.float64)
    weights.scatter_add_(1, drawn, torch.ones(1, dtype=torch.float64).expand_as(drawn))
    weights = torch.cat([torch.ones(1, count, dtype=torch.float64), weights]) / count
    paid, least = weights @ spent, least_kl(weights @ scores, weights @ moments, etas)
    lowest = values.min() if count else 0.0
    return Price(
        spent=_interval(paid),
        least=_interval(least),
        wasted=_interval(1 - least / paid),
        samples=samples,
        never_right=float(((values == lowest) | ~known).all(dim=1).double().mean()),
    )


def _interval(values: Float[Tensor, " resampled"]) -> Interval:
    """Return the first, with the middle 95% of the others."""
    mean, *others = values.tolist()
    others = sorted(others, key=lambda x: (math.isnan(x), x))
    cut = round(0.025 * len(others))
    return Interval(mean, others[cut], others[-1 - cut])
