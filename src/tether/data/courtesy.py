"""A small preference task with a hidden taste that can be computed: sums, answered with courtesy.

    What is 12+34?     It is 46. Thank you!
    12+34等于几？       是46。谢谢！

People here want the right number first, then one word of thanks in the language of the question,
and no fuss. Their taste is `utility`; nobody in training sees it. What is seen are demonstrations
in every manner, and comparisons of two responses in which people err the more, the closer the call.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tether.data.arithmetic import Split, draw_operand, split_of

Language = Literal["english", "chinese"]
LANGUAGES: tuple[Language, ...] = ("english", "chinese")

SAYING = {"english": "It is {}.", "chinese": "是{}。"}
THANKS = {"english": "Thank you!", "chinese": "谢谢！"}
JOINT = {"english": " ", "chinese": ""}

# Of how many demonstrations in a hundred: the bare number, a sentence, one with thanks, with two.
MANNERS = {"bare": 30, "sentence": 45, "thanks": 17, "fuss": 8}

RIGHT, THANKED, FUSS, LENGTH = 2.0, 1.0, -0.5, -0.02
NUMBER = re.compile(r"[0-9]+")


@dataclass(frozen=True)
class Question:
    prompt: str
    language: Language
    total: int

    def row(self) -> dict[str, Any]:
        return asdict(self)


def utility(response: str, language: str, total: int) -> float:
    """What people truly think of a response: 2 if it is right, 1 for thanks in the language of the
    question, -0.5 for every further time, -0.02 a character."""
    thanks = count_thanks(response, language)
    fuss = max(0, thanks - 1)
    return (
        RIGHT * is_right(response, total)
        + THANKED * (thanks > 0)
        + FUSS * fuss
        + LENGTH * len(response)
    )


def is_right(response: str, total: int) -> bool:
    """The first number counts."""
    number = NUMBER.search(response)
    return number is not None and number.group() == str(total)


def count_thanks(response: str, language: str) -> int:
    return response.count(THANKS[language])


def draw_questions(rng: random.Random, split: Split) -> Iterator[Question]:
    """An endless stream from one side of the split by which arithmetic's own pairs are parted."""
    while True:
        a, b = (draw_operand(rng, digit_share=0.5) for _ in range(2))
        if split_of(a, b) != split:
            continue
        language = rng.choice(LANGUAGES)
        prompt = f"What is {a}+{b}?" if language == "english" else f"{a}+{b}等于几？"
        yield Question(prompt, language, a + b)


def demonstrate(question: Question, rng: random.Random) -> str:
    """A right answer in one of the manners; nobody who demonstrates knows which is liked best."""
    [manner] = rng.choices(list(MANNERS), weights=list(MANNERS.values()))
    if manner == "bare":
        return str(question.total)
    thanks = {"sentence": 0, "thanks": 1, "fuss": 2}[manner]
    sentence = SAYING[question.language].format(question.total)
    return JOINT[question.language].join([sentence] + [THANKS[question.language]] * thanks)
