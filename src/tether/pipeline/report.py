"""What a policy is worth: to the reward model, and by the true preference."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tether.data.courtesy import Question, count_yes, is_right, utility
from tether.data.files import read_rows
from tether.pipeline.layout import Layout
from tether.pipeline.preferences import sample_texts
from tether.train.evaluate import Evaluation, wilson


@dataclass(frozen=True)
class Standing:
    """A policy on the held-out questions, one sampled response each."""

    reward: float  # by the reward model, in standard deviations of SFT's
    kl: float | None  # to SFT, in nats a response
    utility: float  # true
    right: float  # share of right numbers
    greeted: float  # share with a yes in the language of the question
    wins: float  # against SFT by the true preference; a tie counts half
    wins_low: float  # 95% interval, Wilson's
    wins_high: float
    questions: int


def stand(layout: Layout, policy: Path, rival: Path, evaluation: Evaluation) -> Standing:
    """`evaluation` is PPO's own of that policy; the true preference is asked here."""
    questions = [Question(**row) for row in read_rows(str(layout.file("questions", "heldout")))]
    texts = sample_texts(layout.config, policy, questions, "stand")
    rivals = sample_texts(layout.config, rival, questions, "rival")
    asked = list(zip(questions, texts, strict=True))
    count = len(questions)
    wins = won(
        [utility(text, q) for q, text in asked],
        [utility(text, q) for q, text in zip(questions, rivals, strict=True)],
    )
    low, high = wilson(wins, count)
    return Standing(
        reward=evaluation.sampled.mean,
        kl=evaluation.kl,
        utility=math.fsum(utility(text, q) for q, text in asked) / count,
        right=sum(is_right(text, q) for q, text in asked) / count,
        greeted=sum(count_yes(text, q) > 0 for q, text in asked) / count,
        wins=wins,
        wins_low=low,
        wins_high=high,
        questions=count,
    )


def won(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Share of comparisons that are won; a tie counts half."""
    points = [(a > b) + 0.5 * (a == b) for a, b in zip(ours, theirs, strict=True)]
    return sum(points) / len(points)
