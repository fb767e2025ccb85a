"""Bilingual addition dialogues: the task of the starter model and of the demo.

A problem is a pair of operands in 0..99 put into one of three forms:

    sum      12+34=?                      ->  46
    chinese  你知道3+4=9吗？               ->  不对，3+4=7
    english  Do you know that 1+1=2?      ->  Yes, 1+1=2

An unordered pair {a, b} belongs to one side of the split for good, so neither its mirror image
nor another form of it can leak from training into the held-out prompts.
"""

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Form = Literal["sum", "chinese", "english"]
Split = Literal["train", "heldout"]

FORMS: tuple[Form, ...] = ("sum", "chinese", "english")
MAX_OPERAND = 99
HELDOUT_PERCENT = 18


@dataclass(frozen=True)
class Problem:
    prompt: str
    answer: str


def split_of(a: int, b: int) -> Split:
    """Return the side of the split of {a, b}, by CRC-32: hash() differs between runs."""
    low, high = sorted((a, b))
    bucket = zlib.crc32(f"{low}+{high}".encode()) % 100
    return "heldout" if bucket < HELDOUT_PERCENT else "train"


def carries(a: int, b: int) -> bool:
    """Return whether adding the ones digits carries into the tens."""
    return a % 10 + b % 10 >= 10


def make_problem(form: Form, a: int, b: int, claim: int) -> Problem:
    """Put a+b into words. `claim` is the sum the asker believes in; the sum form has no claim."""
    total = a + b
    match form:
        case "sum":
            return Problem(f"{a}+{b}=?", f"{total}")
        case "chinese":
            verdict = "是的" if claim == total else "不对"
            return Problem(f"你知道{a}+{b}={claim}吗？", f"{verdict}，{a}+{b}={total}")
        case "english":
            verdict = "Yes" if claim == total else "No"
            return Problem(f"Do you know that {a}+{b}={claim}?", f"{verdict}, {a}+{b}={total}")


def draw_operand(rng: random.Random, digit_share: float) -> int:
    """Draw an operand, a single digit in `digit_share` of cases: uniformly, 1+1 is too rare."""
    return rng.randint(0, 9) if rng.random() < digit_share else rng.randint(0, MAX_OPERAND)


def draw_claim(rng: random.Random, total: int) -> int:
    """Draw the true total half of the time, else one off by at most ten: size tells nothing."""
    if rng.random() < 0.5:
        return total
    near = [c for c in range(max(0, total - 10), total + 11) if c != total]
    return rng.choice(near)


def draw_problems(
    rng: random.Random,
    split: Split,
    forms: Sequence[Form] = FORMS,
    digit_share: float = 0.25,
    keep: Callable[[int, int], bool] = lambda a, b: True,
) -> Iterator[Problem]:
    """Yield problems from one side of the split, without end.

    Each form is as frequent as it is in `forms`. `keep` rejects operand pairs; it may draw from
    `rng` itself to thin them out.
    """
    while True:
        a, b = draw_operand(rng, digit_share), draw_operand(rng, digit_share)
        if split_of(a, b) == split and keep(a, b):
            yield make_problem(rng.choice(forms), a, b, draw_claim(rng, a + b))


def draw_distinct(problems: Iterator[Problem], num: int) -> list[Problem]:
    """Take the first `num` problems with different prompts, in the order drawn."""
    distinct: dict[str, Problem] = {}
    while len(distinct) < num:
        problem = next(problems)
        distinct.setdefault(problem.prompt, problem)
    return list(distinct.values())
