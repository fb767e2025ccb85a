"""Compute a row again, from its log-probs to its objective, by the trainer's own functions.

The order is that of `ppo/iteration.py`. At the run's own settings every number equals the file's
bit for bit. At other settings two things cannot be known from the file, and the note says so: the
moments of rows that were not written, and what the critic would have learnt instead.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tether.algo.advantages import (
    AdvantageInputs,
    WeightedReward,
    critic_returns,
    estimate_advantages,
    gae,
    shape_rewards,
)
from tether.algo.kl import estimate_kl
from tether.algo.losses import LossInputs, PolicyLoss, policy_loss
from tether.algo.masked import masked_moments, whiten
from tether.config import AnyUpdate
from tether.run.columns import COLUMNS, Column
from tether.types import Moments
from tether.view.metric_table import as_number
from tether.view.rollout_rows import (
    FOR_WHAT_IF,
    cells,
    has_what_if,
    is_usable,
    length,
    numbers,
    sampled,
)
from tether.view.run_reader import Rows
from tether.view.settings import Settings

torch.set_num_threads(1)  # the page must not take cores from a run


@dataclass(frozen=True)
class RowTensors:
    """The rows of one file as tensors, group by group; a missing row is masked everywhere."""

    index_of: dict[int, int]  # row number -> row of the tensors
    complete_groups: frozenset[int]
    lengths: dict[int, int]
    samples: int
    mask: Bool[Tensor, "rows response"]
    columns: dict[str, Float[Tensor, "rows response"]]  # as the file has them
    scores: Float[Tensor, " rows"]
    greedy_scores: Float[Tensor, " rows"]
    final_values: Float[Tensor, " rows"]
    moments: Moments
    parts: dict[str, Float[Tensor, " rows"]]  # the named rewards that a score is the sum of


@lru_cache(maxsize=2)
def stack_rows(rows: Rows, samples: int) -> RowTensors:
    """Stack the rows that hold all that what-if needs. The width changes no number."""
    usable = {n: row for n, row in rows.by_number.items() if n >= 0 and has_what_if(row)}
    groups = sorted({number // samples for number in usable})
    stacked = [group * samples + offset for group in groups for offset in range(samples)]
    index_of = {number: i for i, number in enumerate(stacked) if number in usable}
    width = max((length(row) for row in usable.values()), default=1) or 1
    present = [usable.get(number) for number in stacked]

    def tensor(column: Column) -> Tensor:
        return _padded([(cells(row, column) or []) if row else [] for row in present], width)

    def scalar(name: str) -> Tensor:
        return torch.tensor([_known(row, name) for row in present], dtype=torch.float32)

    def part(name: str) -> Tensor:
        given = [(row or {}).get("score_parts") for row in present]
        found = [_known(parts if isinstance(parts, dict) else {}, name) for parts in given]
        return torch.tensor(found, dtype=torch.float32)

    mask = [sampled(row) if row and is_usable(row) else [] for row in present]
    whitening = next(iter(usable.values()), {}).get("whitening", {})
    return RowTensors(
        index_of=index_of,
        complete_groups=frozenset(
            g for g in groups if all(g * samples + i in index_of for i in range(samples))
        ),
        lengths={number: length(row) for number, row in usable.items()},
        samples=samples,
        mask=_padded(mask, width).bool(),
        columns={column.name: tensor(column) for column in FOR_WHAT_IF},
        scores=scalar("score"),
        greedy_scores=scalar("greedy_score"),
        final_values=scalar("final_value"),
        moments=Moments(
            mean=torch.tensor(_known(whitening, "mean"), dtype=torch.float32),
            variance=torch.tensor(_known(whitening, "variance"), dtype=torch.float32),
            count=torch.tensor(int(_known(whitening, "count"))),
        ),
        parts={name: part(name) for name in _part_names(usable.values())},
    )


@dataclass(frozen=True)
class Stages:
    """Every column of every row, and what the trust region did to each token."""

    columns: dict[str, Float[Tensor, "rows response"] | None]  # None: it cannot be computed
    clipped: dict[str, Bool[Tensor, "rows response"]]  # by the word of `Journey.clip`
    outside: Bool[Tensor, "rows response"] | None


@dataclass(frozen=True)
class Journey:
    """One row's columns; None where the file lacks what they are computed from."""

    columns: dict[str, list[float] | None]
    # Per token: high, low, dual: the bound took its gradient away; capped: it made it smaller.
    clip: list[str]
    outside: list[bool] | None  # beyond the bound, clipped or not; None = there is no bound

    def totals(self) -> dict[str, float | int | None]:
        """Return the sums that the page shows above the table."""
        return {
            "reward": _total(self.columns["token_level_rewards"]),
            "clipped": sum(bool(mark) for mark in self.clip),
            "objective": _total(self.columns["objective"]),
        }


def logged_journey(rows: Rows, number: int, own: Settings, samples: int) -> Journey:
    """Return a row as it was, with what follows from its numbers at the run's own settings."""
    tensors = stack_rows(rows, samples)
    if number not in tensors.index_of or own.unknown:
        return _only_logged(rows, number)
    return _row_of(from_log(tensors, own), tensors, number)


def recompute(
    rows: Rows, number: int, own: Settings, settings: Settings, samples: int
) -> tuple[Journey, Journey, str | None]:
    """Return the row as it was, as it would be, and what to keep in mind."""
    tensors = stack_rows(rows, samples)
    if number not in tensors.index_of:
        logged = _only_logged(rows, number)
        return logged, logged, "This row lacks columns, so nothing can be computed from it."
    before = _row_of(from_log(tensors, own), tensors, number)
    after = _row_of(from_settings(tensors, settings), tensors, number)
    return before, after, _note(tensors, number, own, settings)


def logged_column(rows: Rows, name: str, own: Settings, samples: int) -> dict[int, list[float]]:
    """Return a computed column of every row at the run's own settings; empty if it is unknown."""
    tensors = stack_rows(rows, samples)
    column = None if own.unknown else from_log(tensors, own).columns[name]
    if column is None:
        return {}
    cells = column.tolist()
    return {n: cells[i][: tensors.lengths[n]] for n, i in tensors.index_of.items()}


def recompute_batch(
    rows: Rows, own: Settings, settings: Settings, samples: int
) -> tuple["BatchTotals", "BatchTotals", str | None]:
    """Return sums over all rows of the file as they were, as they would be, and what to keep in
    mind."""
    tensors = stack_rows(rows, samples)
    before, after = from_log(tensors, own), from_settings(tensors, settings)
    note = _note(tensors, min(tensors.index_of, default=0), own, settings)
    return _totals(before, tensors), _totals(after, tensors), note


@dataclass(frozen=True)
class BatchTotals:
    """What a file of rows amounts to under some settings."""

    numbers: dict[str, float | int | None]
    advantages: list[float]  # what the policy loss uses, token by token


def _totals(stages: Stages, tensors: RowTensors) -> BatchTotals:
    mask, columns = tensors.mask, stages.columns
    rows, tokens = len(tensors.index_of), int(mask.sum())

    def moments(name: str) -> tuple[float | None, float | None]:
        x = columns[name]
        if x is None or tokens < 2:
            return None, None
        found = masked_moments(x, mask)
        return float(found.mean), float(found.variance) ** 0.5

    objective, ratio = columns["objective"], columns["ratio"]
    clipped, left = {}, mask
    for word, where in reversed(stages.clipped.items()):  # a later word is the more exact one
        clipped[word] = int((where & left).sum())
        left = left & ~where
    policy = columns["policy_advantages"]
    numbers = {
        "rows": rows,
        "tokens": tokens,
        "reward": _per_row(columns["token_level_rewards"], rows),
        "kl": _per_row(columns["kl"], rows),
        "advantage_mean": moments("advantages")[0],
        "advantage_std": moments("advantages")[1],
        "policy_advantage_std": moments("policy_advantages")[1],
        "positive": None if policy is None else int(((policy > 0) & mask).sum()),
        "ratio_max": None if ratio is None or not tokens else float(ratio[mask].max()),
        **{f"clipped_{word}": count for word, count in reversed(clipped.items())},
        "clipped": sum(clipped.values()) if clipped else None,
        "objective": None if objective is None else float(objective.sum()) / max(tokens, 1),
    }
    return BatchTotals(numbers, [] if policy is None else policy[mask].tolist())


def _per_row(x: Tensor | None, rows: int) -> float | None:
    return None if x is None or not rows else float(x.sum()) / rows


def from_log(tensors: RowTensors, own: Settings) -> Stages:
    """Return the logged columns and what follows from them."""
    return _finish(tensors, tensors.columns, own)


def from_settings(tensors: RowTensors, settings: Settings) -> Stages:
    """Compute everything from the log-probs on, in the order of an iteration."""
    mask, logged = tensors.mask, tensors.columns
    old, ref = logged["old_log_probs"], logged["ref_log_probs"]
    kl = estimate_kl(settings.kl.estimator, old, ref, mask)
    token_level_scores = logged["token_level_scores"]  # no setting moves them
    rewards = shape_rewards(token_level_scores, kl, settings.kl.coef)
    has_critic = settings.advantage.traits.needs_critic
    values = logged["values"] if has_critic else torch.zeros_like(rewards)
    inputs = AdvantageInputs(
        rewards=rewards,
        values=values,
        final_values=tensors.final_values,
        scores=tensors.scores,
        greedy_scores=tensors.greedy_scores,
        mask=mask,
        samples=tensors.samples,
        parts=[
            WeightedReward(weight, tensors.parts.get(name, torch.zeros_like(tensors.scores)))
            for name, weight in settings.part_weights.items()
        ],
        kl_penalty=settings.kl.coef * kl,
    )
    advantages = estimate_advantages(settings.advantage, inputs)
    returns = critic_returns(settings.advantage, inputs, advantages, settings.critic_lam)
    policy_advantages = advantages
    if settings.advantage.whitens:
        policy_advantages = whiten(advantages, mask, _moved(tensors, advantages))
    recomputed = {
        "kl": kl,
        "token_level_scores": token_level_scores,
        "token_level_rewards": rewards,
        "values": values,
        "advantages": advantages,
        "returns": returns,
        "policy_advantages": policy_advantages,
    }
    return _finish(tensors, {**logged, **recomputed}, settings)


def _part_names(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of the rewards in any row."""
    given = [row.get("score_parts") for row in rows]
    return [*dict.fromkeys(name for parts in given if isinstance(parts, dict) for name in parts)]


def _moved(tensors: RowTensors, advantages: Float[Tensor, "rows response"]) -> Moments:
    """Return the batch's moments, moved as those of the logged rows move: at own settings not."""
    was = masked_moments(tensors.columns["advantages"], tensors.mask)
    now = masked_moments(advantages, tensors.mask)
    spread = torch.where(was.variance > 0, now.variance / was.variance, 1.0)
    return Moments(
        mean=tensors.moments.mean + (now.mean - was.mean),
        variance=tensors.moments.variance * spread,
        count=tensors.moments.count,
    )


def _finish(tensors: RowTensors, columns: dict[str, Tensor], settings: Settings) -> Stages:
    """Add the columns that no file has."""
    mask, final_values = tensors.mask, tensors.final_values
    if not settings.advantage.traits.needs_critic:
        final_values = torch.zeros_like(final_values)
    deltas = gae(  # lambda 0 leaves the one-step error alone
        columns["token_level_rewards"],
        columns["values"],
        final_values,
        mask,
        settings.advantage.gamma,
        lam=0.0,
    )
    inputs = LossInputs(
        new_log_probs=columns["new_log_probs"],
        old_log_probs=columns["old_log_probs"],
        advantages=columns["policy_advantages"],
        mask=mask,
    )
    ratio, objective, clipped, outside = inputs.ratio, None, {}, None
    if settings.update is not None:
        loss, clipped = _policy_loss(settings.update, inputs)
        ratio, outside = loss.ratio, loss.outside
        weighted = loss.per_token.detach() * columns["correction_weights"]
        objective = torch.where(mask, -weighted, 0.0)
    computed = {"deltas": deltas, "ratio": torch.where(mask, ratio, 0.0), "objective": objective}
    return Stages({**columns, **computed}, clipped, outside)


def _policy_loss(
    update: AnyUpdate, inputs: LossInputs
) -> tuple[PolicyLoss, dict[str, Bool[Tensor, "rows response"]]]:
    """Return the loss, and where its bound did what; a gradient that is left tells "capped"."""
    new_log_probs = inputs.new_log_probs.detach().requires_grad_()
    with torch.enable_grad():
        loss = policy_loss(update, replace(inputs, new_log_probs=new_log_probs))
        [gradient] = torch.autograd.grad(loss.per_token.sum(), new_log_probs)
    return loss, {
        "high": loss.clipped_high & inputs.mask,
        "low": loss.clipped_low & inputs.mask,
        "dual": loss.clipped_dual & inputs.mask,
        "capped": loss.clipped & (gradient != 0) & inputs.mask,
    }


def _row_of(stages: Stages, tensors: RowTensors, number: int) -> Journey:
    index, size = tensors.index_of[number], tensors.lengths[number]

    def cut(x: Tensor) -> list[Any]:
        return x[index, :size].tolist()

    clip = [""] * size
    for word, where in stages.clipped.items():  # a later word is the more exact one
        clip = [word if here else mark for here, mark in zip(cut(where), clip, strict=True)]
    columns = {name: None if x is None else cut(x) for name, x in stages.columns.items()}
    return Journey(columns, clip, None if stages.outside is None else cut(stages.outside))


def _only_logged(rows: Rows, number: int) -> Journey:
    row = rows.by_number[number]
    columns = {c.name: None if c.computed else numbers(row, c.name) for c in COLUMNS}
    return Journey(columns, [""] * length(row), outside=None)


def _note(tensors: RowTensors, number: int, own: Settings, settings: Settings) -> str | None:
    sentences, traits = [], settings.advantage.traits
    if settings != own and settings.advantage.whitens:
        sentences.append(
            f"Whitening saw the whole batch, of which {len(tensors.index_of)} rows are in the "
            f"file: its mean and variance are moved as theirs are."
        )
    if settings != own and traits.needs_critic:
        sentences.append("The critic's values stay as they were logged.")
    if traits.by_group and number // tensors.samples not in tensors.complete_groups:
        sentences.append("Rows of this group are missing: its baseline is that of the others.")
    if settings.update is None:
        sentences.append("This version does not know the run's kind of update: no objective.")
    elif settings.update.needs_old_policy:
        sentences.append(
            "The loss used the old policy's whole distribution, which the file does not hold: the "
            "objective shown has an estimate from the sampled tokens in its place."
        )
    return " ".join(sentences) or None


def _total(column: list[float] | None) -> float | None:
    return None if column is None else sum(column)


def _known(mapping: dict[str, Any] | None, name: str) -> float:
    """Return a number of a row; 0 where there is none, as an unscored row trains with 0."""
    value = as_number((mapping or {}).get(name))
    return value if value == value else 0.0


def _padded(rows: Sequence[Sequence[float]], width: int) -> Float[Tensor, "rows width"]:
    padded = [[*row, *[0.0] * (width - len(row))] for row in rows] or [[0.0] * width]
    return torch.tensor(padded, dtype=torch.float32)
