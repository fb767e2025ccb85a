"""The advantage estimators as data: what each of them needs, and its formula.

The config's rules, the plan, the page, `tether trace` and docs/config.md read this table; the
function of each name is in `tether.algo.advantages`. A new estimator is a row here and a function
there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tether.config.base import Aggregation


@dataclass(frozen=True)
class EstimatorTraits:
    """What the rest of the program has to know about an estimator.

    In `formula`, s is the sum of a row's token rewards, l its length, r is a token's reward, V its
    value, and ′ marks the next token; mean, std and Σ are over the responses to one prompt, j ≠ i
    over the others, argmax π is the greedy response, s_n the n-th named reward of weight w, and z
    standardises over the rows of the batch. Symbols alone: the trace shows it in
    every language.
    """

    formula: str
    paper: str
    needs_critic: bool = False
    needs_greedy: bool = False  # one greedy response per prompt, scored
    by_group: bool = False  # compares the responses to one prompt
    needs_teacher: bool = False  # learns from the KL to `model.reference` alone
    needs_parts: bool = False  # several named rewards, `reward.parts`; their KL is not among them
    whitens: bool = False  # unless advantage.whiten says otherwise
    aggregation: Aggregation = "token_mean"  # of the token losses, in its paper


ESTIMATORS = {
    "gae": EstimatorTraits(
        formula="δ = r + γ·V′ − V,  A = δ + γ·λ·A′",
        paper="Schulman et al. 2016, 1506.02438",
        needs_critic=True,
        whitens=True,
    ),
    "grpo": EstimatorTraits(
        formula="A = (s − mean(s)) / (std(s) + 1e-6)",
        paper="Shao et al. 2024, 2402.03300",
        by_group=True,
    ),
    "dr_grpo": EstimatorTraits(
        formula="A = s − mean(s)",
        paper="Liu et al. 2025, 2503.20783",
        by_group=True,
        aggregation="seq_mean_token_sum_norm",
    ),
    "rloo": EstimatorTraits(
        formula="A = s − mean(s_j, j ≠ i)",
        paper="Ahmadian et al. 2024, 2402.14740",
        by_group=True,
    ),
    "reinforce_plus_plus": EstimatorTraits(
        formula="A = r + γ·A′",
        paper="Hu et al. 2025, 2501.03262",
        whitens=True,
    ),
    "reinforce_plus_plus_baseline": EstimatorTraits(
        formula="A = s − mean(s)",
        paper="Hu et al. 2025, 2501.03262",
        by_group=True,
        whitens=True,
    ),
    "remax": EstimatorTraits(
        formula="A = r + γ·r′ + … − s(argmax π)",
        paper="Li et al. 2023, 2310.10505",
        needs_greedy=True,
    ),
    "opo": EstimatorTraits(
        formula="A = s − Σ l·s / Σ l",
        paper="Hao et al. 2025, 2505.23585",
        by_group=True,
    ),
    "gdpo": EstimatorTraits(
        formula="A = z(Σ w·(s_n − mean(s_n)) / (std(s_n) + 1e-6)),  z(x) = (x − mean) / std",
        paper="Liu et al. 2026, 2601.05242",
        by_group=True,
        needs_parts=True,
    ),
    "distillation": EstimatorTraits(
        formula="A = −β·(log π_old − log π_ref)",
        paper="Agarwal et al. 2024, 2306.13649",
        needs_teacher=True,
    ),
}

if TYPE_CHECKING:
    EstimatorName = str
else:
    EstimatorName = Literal[tuple(ESTIMATORS)]
