"""A frozen reward model as the reward: scores at the last token, under its own chat template.

Scores are relative to the reference's responses: 0 is as good as the reference on average, 1 is one
standard deviation better. So a beta means the same for reward models of any scale.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tether.data.dialogues import encode_whole_dialogue
from tether.data.files import BadRow
from tether.dist.collectives import all_or_error
from tether.dist.world import REWARDS, waiting_for
from tether.errors import UserError
from tether.models.forward import Network
from tether.models.reward_model import RewardModel
from tether.rewards.functions import Row
from tether.rewards.scorers import Batch, Scale, Scorer, Verdict


def measure_scale(raw: Sequence[float]) -> Scale:
    """Return the scale of the reference's raw scores; its std is 0 where they are all equal."""
    mean = math.fsum(raw) / max(1, len(raw))
    variance = math.fsum((score - mean) ** 2 for score in raw) / max(1, len(raw) - 1)
    return Scale(mean, math.sqrt(variance))


class LearnedScorer(Scorer):
    """Score rows by a reward model, in this process: no code of the user's runs."""

    def __init__(self, reward: RewardModel, system_prompt: str | None, scale: Scale) -> None:
        self.reward = reward
        self.system_prompt = system_prompt
        self.scale = scale

    def score(self, rows: Sequence[Row], batch: Batch | None = None) -> list[Verdict]:
        """Return one verdict per row, relative to the reference."""
        if self.scale.std == 0:
            raise UserError(
                "The reward model gives all responses of the reference the same score, so there "
                "is nothing to learn from; check reward.kind."
            )
        return [
            Verdict(None, raw) if isinstance(raw, str) else Verdict(self.scale(raw))
            for raw in self.raw_scores(rows)
        ]

    def raw_scores(self, rows: Sequence[Row]) -> list[float | str]:
        """Return per row the model's own score, or why there is none."""
        with waiting_for(REWARDS):
            dialogues = all_or_error(lambda: [self._ids(row) for row in rows])
        limit = self.reward.max_tokens
        short = [i for i, ids in enumerate(dialogues) if limit is None or len(ids) <= limit]
        found: list[float | str] = [
            f"the dialogue has {len(ids)} tokens, but the reward model only {limit} positions"
            for ids in dialogues
        ]
        scores = self.reward.scores([dialogues[i] for i in short]).tolist()
        for i, score in zip(short, scores, strict=True):
            found[i] = score if math.isfinite(score) else f"the reward model gave {score}"
        return found

    def units(self) -> Scale:
        """Return the scale of the reference's responses."""
        return self.scale

    def networks(self) -> list[Network]:
        """Return the reward model."""
        return [self.reward.network()]

    def state(self) -> dict[str, Any]:
        """Return the scale."""
        return {"reward_scale": asdict(self.scale)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take the scale from a checkpoint's state."""
        self.scale = Scale(**state["reward_scale"])

    def _ids(self, row: Row) -> list[int]:
        try:
            return encode_whole_dialogue(
                self.reward.tokenizer,
                row["prompt"],
                row["response"],
                self.system_prompt,
                row["finished"],
            )
        except BadRow as problem:
            raise UserError(f"The reward model cannot read a prompt: {problem}") from None
