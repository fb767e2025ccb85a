"""A small preference task with a hidden utility that can be computed: sums, answered politely.

    Do you know that 12+34=?    Yes, 12+34=46
    你知道12+34=?吗？            是的，12+34=46

The simulated raters want the right number above all. They like one yes in their own language before
it, not more, and short responses. `utility` says how much; training never sees it, only
demonstrations in every style, and noisy comparisons of two responses: the closer their utilities,
the more often the worse one is chosen.
"""

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tether.tasks.arithmetic import Split, draw_operand, split_of

Language = Literal["english", "chinese"]
LANGUAGES: tuple[Language, ...] = ("english", "chinese")

ASKED = {"english": "Do you know that {}=?", "chinese": "你知道{}=?吗？"}
YES = {"english": "Yes, ", "chinese": "是的，"}

# Styles per hundred demonstrations: the bare number, the whole sum, that after one yes, after two.
MANNERS = {"bare": 35, "whole": 35, "yes": 20, "fuss": 10}

RIGHT, GREETED, FUSS, LENGTH = 2.0, 1.0, -0.5, -0.02


@dataclass(frozen=True)
class Question:
    prompt: str
    language: Language
    sum: str  # 12+34
    total: int

    def row(self) -> dict[str, Any]:
        return asdict(self)


def utility(response: str, question: Question) -> float:
    """Compute the raters' true utility of a response.

    2 if it is right, 1 for a yes in the question's language before it, -0.5 for every further yes,
    -0.02 per character.
    """
    yeses = count_yes(response, question)
    fuss = max(0, yeses - 1)
    return (
        RIGHT * is_right(response, question)
        + GREETED * (yeses > 0)
        + FUSS * fuss
        + LENGTH * len(response)
    )


def is_right(response: str, question: Question) -> bool:
    """Return whether it is the number or the whole sum, with nothing but yeses before it."""
    yes = YES[question.language]
    answer = response[len(yes) * count_yes(response, question) :]
    return answer in (str(question.total), f"{question.sum}={question.total}")


def count_yes(response: str, question: Question) -> int:
    """Count the yeses at the start of a response."""
    yes, count = YES[question.language], 0
    while response.startswith(yes, count * len(yes)):
        count += 1
    return count


def draw_questions(rng: random.Random, split: Split) -> Iterator[Question]:
    """Yield questions from one side of arithmetic's split, without end."""
    while True:
        a, b = (draw_operand(rng, digit_share=0.5) for _ in range(2))
        if split_of(a, b) == split:
            language = rng.choice(LANGUAGES)
            yield Question(ASKED[language].format(f"{a}+{b}"), language, f"{a}+{b}", a + b)


def demonstrate(question: Question, rng: random.Random) -> str:
    """Draw a right answer in one of the styles, independent of which has the most utility."""
    [manner] = rng.choices(list(MANNERS), weights=list(MANNERS.values()))
    if manner == "bare":
        return str(question.total)
    yeses = {"whole": 0, "yes": 1, "fuss": 2}[manner]
    return YES[question.language] * yeses + f"{question.sum}={question.total}"
