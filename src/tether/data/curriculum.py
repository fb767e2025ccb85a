"""Prompts that pay: drawn by what each has scored so far, solved ones retired.

The state is three numbers per training prompt. A draw depends on them and on its key alone, so a
resumed run draws what the run would have drawn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tether.algo.random import uniform
from tether.config import Config, CurriculumSection
from tether.errors import RunStopped, UserError

NEVER = -1  # the iteration of a prompt that has not been drawn
LEAST_WEIGHT = 0.05  # of 1: a prompt that always fails, or is solved, may have changed since


@dataclass(frozen=True)
class Curriculum:
    """What is known of each training prompt. Shapes: one number per prompt."""

    settings: CurriculumSection
    score: Float[np.ndarray, " prompts"]  # running mean over draws; 0 before the first
    drawn_at: Int[np.ndarray, " prompts"]  # the last iteration that drew it, or NEVER
    solved_draws: Int[np.ndarray, " prompts"]  # on end

    @property
    def retired(self) -> Bool[np.ndarray, " prompts"]:
        """Mark the prompts that were solved often enough to be drawn no more."""
        enough = self.settings.retire_after
        return self.solved_draws >= enough if enough else np.zeros(len(self.score), dtype=bool)

    def weights(self, iteration: int) -> Float[np.ndarray, " prompts"]:
        """Return how likely each prompt is to be drawn, in relation to the others.

        By difficulty: 4 p (1 - p), at least 0.05, where p is the running score's place between
        `failed` and `solved`; a prompt never drawn has 1. With scores of 0 and 1 that is the
        variance of a response's score, which the policy gradient is made of (Rutherford et al.
        2024, arXiv 2408.15099; for language models Foster et al. 2025, arXiv 2502.12272). By
        staleness: the iterations since it was drawn (Jiang et al. 2021, arXiv 2010.03934,
        equation 2).
        """
        if self.settings.by == "staleness":
            return (iteration - self.drawn_at).astype(float)
        low, high = self.settings.failed, self.settings.solved
        p = np.clip((self.score - low) / (high - low), 0.0, 1.0)
        learnable = np.maximum(4 * p * (1 - p), LEAST_WEIGHT)
        return np.where(self.drawn_at == NEVER, 1.0, learnable)

    def draw(self, iteration: int, count: int, seed: int) -> list[int]:
        """Return `count` different prompts, drawn by weight; the least recent of the retired where
        too few others are left.

        The largest u^(1/w) of keyed uniform numbers u are a weighted sample without replacement
        (Efraimidis and Spirakis 2006, *Weighted random sampling with a reservoir*).
        """
        if self.retired.all():
            raise RunStopped(
                f"All {len(self.score)} training prompts scored {self.settings.solved:g} or more "
                f"in data.curriculum.retire_after = {self.settings.retire_after} draws on end, so "
                f"there is nothing left to draw. Use other prompts, or retire_after 0, which draws "
                f"solved ones too."
            )
        rows = np.arange(len(self.score))
        u = uniform(seed, "curriculum", iteration, rows).numpy()
        keys = np.log(np.maximum(u, np.finfo(float).tiny)) / self.weights(iteration)
        # Lexicographic: the last key sorts first. Those in use by key, the retired by age.
        keys = np.where(self.retired, self.drawn_at, -keys)
        return np.lexsort((rows, keys, self.retired))[:count].tolist()

    def after(
        self,
        iteration: int,
        drawn: Sequence[int],
        scores: Float[Tensor, " rows"],
        scored: Bool[Tensor, " rows"],
    ) -> "Curriculum":
        """Return the state after an iteration.

        Shapes: rows are the drawn prompts times samples_per_prompt, those of a prompt side by side.
        A prompt none of whose rows has a score keeps what it had.
        """
        values = scores.double().cpu().view(len(drawn), -1)
        counted = scored.cpu().view(len(drawn), -1)
        known = counted.any(dim=1).numpy()
        sums = torch.where(counted, values, 0.0).sum(dim=1)
        means = (sums / counted.sum(dim=1).clamp(min=1)).numpy()[known]
        score, drawn_at = self.score.copy(), self.drawn_at.copy()
        solved_draws = self.solved_draws.copy()
        rows = np.asarray(drawn)
        fresh, seen = rows[known], self.drawn_at[rows[known]] != NEVER
        share = np.where(seen, self.settings.newest, 1.0)
        score[fresh] += share * (means - score[fresh])
        solved_draws[fresh] = np.where(means >= self.settings.solved, solved_draws[fresh] + 1, 0)
        drawn_at[rows] = iteration
        return replace(self, score=score, drawn_at=drawn_at, solved_draws=solved_draws)

    def metrics(self) -> dict[str, float]:
        """Return the shares of prompts that were drawn, and that are retired."""
        return {
            "curriculum/drawn_share": float((self.drawn_at != NEVER).mean()),
            "curriculum/retired_share": float(self.retired.mean()),
        }

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint keeps."""
        names = ("score", "drawn_at", "solved_draws")
        return {name: torch.from_numpy(getattr(self, name)) for name in names}

    def with_state(self, state: Mapping[str, Tensor]) -> "Curriculum":
        """Return a copy with the numbers of a checkpoint."""
        return replace(self, **{name: tensor.numpy() for name, tensor in state.items()})


def begin_curriculum(config: Config, prompts: int) -> Curriculum | None:
    """Return the state in which no training prompt has been drawn; None without a curriculum."""
    settings, wanted = config.data.curriculum, config.rollout.prompts
    if settings is None:
        return None
    if prompts < wanted:
        raise UserError(
            f"data.curriculum draws different prompts, but data.train has {prompts} and an "
            f"iteration takes rollout.prompts = {wanted}; write at most {prompts}."
        )
    return Curriculum(
        settings,
        score=np.zeros(prompts),
        drawn_at=np.full(prompts, NEVER, dtype=np.int64),
        solved_draws=np.zeros(prompts, dtype=np.int64),
    )
