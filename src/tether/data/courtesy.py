"""A small preference task with a hidden taste that can be computed: sums, answered with courtesy.

    Do you know that 1+1=3?    No, 1+1=2. Thanks!
    你知道3+4=7吗？             是的，3+4=7。谢谢！

The sums are those of `arithmetic`, as claims in two languages. People here want the right answer
first, then one word of thanks in the language of the question, and no fuss. Their taste is
`utility`; nobody in training sees it. What is seen are demonstrations in every manner, and
comparisons of two responses in which people err the more, the closer the call.
"""

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tether.data.arithmetic import Form, Split, draw_problems

Language = Literal["english", "chinese"]
FORMS: tuple[Form, ...] = ("chinese", "english")

THANKS = {"english": ". Thanks!", "chinese": "。谢谢！"}
AGAIN = {"english": " Thanks!", "chinese": "谢谢！"}

# How often each number of thanks is demonstrated: nobody who demonstrates knows what is liked.
MANNERS = {0: 0.65, 1: 0.25, 2: 0.10}

RIGHT, THANKED, FUSS, LENGTH = 2.0, 1.0, -0.5, -0.02


@dataclass(frozen=True)
class Question:
    prompt: str
    answer: str
    language: Language

    def row(self) -> dict[str, Any]:
        return asdict(self)


def utility(response: str, answer: str, language: str) -> float:
    """What people truly think of a response: 2 if it is right, 1 for thanks in the language of the
    question, -0.5 for every further time, -0.02 a character."""
    thanks = count_thanks(response, language)
    fuss = max(0, thanks - 1)
    return (
        RIGHT * is_right(response, answer)
        + THANKED * (thanks > 0)
        + FUSS * fuss
        + LENGTH * len(response)
    )


def is_right(response: str, answer: str) -> bool:
    """It begins with the answer, and the answer's last number ends there."""
    rest = response.removeprefix(answer)
    return response.startswith(answer) and not rest[:1].isdigit()


def count_thanks(response: str, language: str) -> int:
    return response.count(AGAIN[language].strip())


def draw_questions(rng: random.Random, split: Split) -> Iterator[Question]:
    """An endless stream of claims from one side of the split."""
    for problem in draw_problems(rng, split, FORMS, digit_share=0.5):
        language = "english" if problem.prompt.isascii() else "chinese"
        yield Question(problem.prompt, problem.answer, language)


def demonstrate(question: Question, rng: random.Random) -> str:
    """The right answer in one of the manners."""
    [thanks] = rng.choices(list(MANNERS), weights=list(MANNERS.values()))
    if not thanks:
        return question.answer
    return question.answer + THANKS[question.language] + AGAIN[question.language] * (thanks - 1)
