"""A row's journey again: from its log-probs to its objective, by the trainer's own functions.

The order is that of `ppo/iteration.py`. At the run's own settings every number equals the file's
bit for bit. At other settings two things cannot be known from the file, and the note says so: the
moments of rows that were not kept, and what the critic would have learnt instead.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tether.algo.advantages import (
    AdvantageInputs,
    estimate_advantages,
    gae,
    place_scores,
    shape_rewards,
)
from tether.algo.kl import estimate_kl
from tether.algo.losses import LossInputs, PolicyLoss, policy_loss
from tether.algo.masked import masked_moments, whiten
from tether.config import CispoUpdate, ClipUpdate, GspoUpdate
from tether.types import Moments
from tether.view.rollout_rows import NEEDED, Kept, length, numbers, read_kept
from tether.view.run_reader import Rows
from tether.view.settings import Settings

torch.set_num_threads(1)  # the page must not take cores from a run

COMPUTED = ("td_errors", "ratio", "objective")


@dataclass(frozen=True)
class Stages:
    """What the page shows of every token, for all rows."""

    columns: dict[str, Float[Tensor, "rows response"]]
    loss: PolicyLoss


@dataclass(frozen=True)
class Journey:
    """One row's columns; None where the file lacks what they are computed from."""

    columns: dict[str, list[float] | None]
    clip: list[str]

    def totals(self) -> dict[str, float | int | None]:
        return {
            "reward": _total(self.columns["token_level_rewards"]),
            "clipped": sum(bool(mark) for mark in self.clip),
            "objective": _total(self.columns["objective"]),
        }


def logged_journey(rows: Rows, number: int, own: Settings, kind: str, samples: int) -> Journey:
    """A row as it was, with what follows from its numbers at the run's own settings."""
    kept = read_kept(rows, samples)
    if number not in kept.slot_of:
        return _nothing(rows, number)
    return _row_of(from_log(kept, own, kind), kept, number)


def recompute(
    rows: Rows, number: int, own: Settings, settings: Settings, kind: str, samples: int
) -> tuple[Journey, Journey, str | None]:
    """(as it was, as it would be, what to keep in mind)."""
    kept = read_kept(rows, samples)
    if number not in kept.slot_of:
        nothing = _nothing(rows, number)
        return nothing, nothing, "This row lacks columns, so nothing can be computed from it."
    before = _row_of(from_log(kept, own, kind), kept, number)
    after = _row_of(from_settings(kept, settings, kind, samples), kept, number)
    return before, after, _note(kept, number, own, settings, kind, samples)


def from_log(kept: Kept, own: Settings, kind: str) -> Stages:
    """The logged numbers, and what follows from them."""
    return _finish(kept, kept.logged, own, kind)


def from_settings(kept: Kept, settings: Settings, kind: str, samples: int) -> Stages:
    """Everything from the log-probs on, in the order of an iteration."""
    mask, logged = kept.mask, kept.logged
    kl = estimate_kl(settings.kl_estimator, logged["old_log_probs"], logged["ref_log_probs"], mask)
    token_level_scores = place_scores(kept.scores, mask)
    rewards = shape_rewards(token_level_scores, kl, settings.beta)
    values = logged["values"] if settings.traits.needs_critic else torch.zeros_like(rewards)
    inputs = AdvantageInputs(
        rewards=rewards,
        values=values,
        final_values=kept.final_values,
        scores=kept.scores,
        greedy_scores=kept.greedy_scores,
        mask=mask,
        samples=samples,
    )
    advantages = estimate_advantages(settings.advantage, inputs)
    returns = advantages + values
    moments = _moved(kept, advantages)
    policy_advantages = whiten(advantages, mask, moments) if settings.whiten else advantages
    recomputed = {
        "kl": kl,
        "token_level_scores": token_level_scores,
        "token_level_rewards": rewards,
        "values": values,
        "advantages": advantages,
        "returns": returns,
        "policy_advantages": policy_advantages,
    }
    return _finish(kept, {**logged, **recomputed}, settings, kind)


def _moved(kept: Kept, advantages: Float[Tensor, "rows response"]) -> Moments:
    """The batch's moments, moved as those of the kept rows move: not at all at own settings."""
    was = masked_moments(kept.logged["advantages"], kept.mask)
    now = masked_moments(advantages, kept.mask)
    spread = torch.where(was.variance > 0, now.variance / was.variance, 1.0)
    return Moments(
        mean=kept.moments.mean + (now.mean - was.mean),
        variance=kept.moments.variance * spread,
        count=kept.moments.count,
    )


def _finish(kept: Kept, columns: dict[str, Tensor], settings: Settings, kind: str) -> Stages:
    mask = kept.mask
    final_values = kept.final_values
    if not settings.traits.needs_critic:
        final_values = torch.zeros_like(final_values)
    td_errors = gae(  # lambda 0 leaves the one-step error alone
        columns["token_level_rewards"],
        columns["values"],
        final_values,
        mask,
        settings.gamma,
        lam=0.0,
    )
    loss = _policy_loss(kept, columns["policy_advantages"], settings, kind)
    computed = {
        "td_errors": td_errors,
        "ratio": torch.where(mask, loss.ratio, 0.0),
        "objective": torch.where(mask, -loss.per_token, 0.0),
    }
    return Stages({**columns, **computed}, loss)


def _policy_loss(
    kept: Kept, advantages: Float[Tensor, "rows response"], settings: Settings, kind: str
) -> PolicyLoss:
    """The loss at these settings. Kinds without a clip have the bare surrogate."""
    new, old = kept.logged["new_log_probs"], kept.logged["old_log_probs"]
    update = {"gspo": GspoUpdate, "cispo": CispoUpdate}.get(kind, ClipUpdate).model_construct(
        kind=kind if kind in ("gspo", "cispo") else "clip",
        eps_low=1.0 if settings.eps_low is None else settings.eps_low,
        eps_high=float("inf") if settings.eps_high is None else settings.eps_high,
        dual_clip=settings.dual_clip,
    )
    return policy_loss(update, LossInputs(new, old, advantages, kept.mask))


def _row_of(stages: Stages, kept: Kept, number: int) -> Journey:
    slot, size = kept.slot_of[number], kept.lengths[number]

    def cut(x: Tensor) -> list[Any]:
        return x[slot, :size].tolist()

    mask, loss = kept.mask, stages.loss
    marks = zip(
        cut(loss.clipped_high & mask),
        cut(loss.clipped_low & mask),
        cut(loss.clipped_dual & mask),
        strict=True,
    )
    return Journey(
        columns={name: cut(x) for name, x in stages.columns.items()},
        clip=[
            "high" if high else "low" if low else "dual" if dual else ""
            for high, low, dual in marks
        ],
    )


def _nothing(rows: Rows, number: int) -> Journey:
    row = rows.by_number[number]
    logged = {name: numbers(row, name) for name in NEEDED}
    return Journey({**logged, **dict.fromkeys(COMPUTED)}, [""] * length(row))


def _note(
    kept: Kept, number: int, own: Settings, settings: Settings, kind: str, samples: int
) -> str | None:
    sentences = []
    if settings != own and settings.whiten:
        sentences.append(
            f"Whitening saw the whole batch, of which {len(kept.slot_of)} rows are kept: its "
            f"mean and variance are moved as theirs are."
        )
    if settings != own and settings.traits.needs_critic:
        sentences.append("The critic's values stay as they were logged.")
    if settings.traits.by_group and number // samples not in kept.complete_groups:
        sentences.append("Rows of this group are missing: its baseline is that of the others.")
    if kind not in ("clip", "gspo", "cispo"):
        sentences.append(
            f"The update was {kind}; the objective shown is ratio x advantage, clipped if asked."
        )
    return " ".join(sentences) or None


def _total(column: list[float] | None) -> float | None:
    return None if column is None else sum(column)
