"""The rewards that ship: plain functions, chosen by name in `reward.kind`, with constants from
`reward.arguments`. Imports no torch."""

import functools
import importlib
import json
import logging
import re
import string
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import cache
from importlib.util import find_spec
from typing import Any

from tether.errors import UserError
from tether.rewards.constraints import all_constraints, constraints
from tether.support.reasoning_gym import reasoning_gym_family

Answer = str | int | float
Answers = Answer | Sequence[Answer]


def several(answers: Answers) -> list[Answer]:
    """Return the answers of a row as a list."""
    found = [answers] if isinstance(answers, Answer) else answers
    if not isinstance(found, list | tuple) or not found:
        raise ValueError(f"the answer is {found!r:.60}; write text, a number, or a list of them")
    for one in found:
        if not isinstance(one, Answer):
            raise ValueError(f"the answer {one!r:.60} in a list is not text or a number")
    return list(found)


def spellings(answers: Answers) -> set[str]:
    """Return every text that is one of the answers; the number 2.0 may be written 2.0 or 2."""
    found = set()
    for one in several(answers):
        found.add(str(one))
        if isinstance(one, bool):
            found.add(str(one).lower())
        elif isinstance(one, float) and one.is_integer():
            found.add(str(int(one)))
    return found


ANSWERS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
TAGS = re.compile(r"</?\w+>")
ARTICLES = re.compile(r"\b(?:a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)

GroundTruth = Answers | Mapping[str, Answers]  # Search-R1 nests it: {"target": [...]}


def search_answer(policy_turns: Sequence[str], ground_truth: GroundTruth) -> float:
    """Return 1 if the policy's last `<answer>` is the target, or one of several, ignoring case,
    ASCII punctuation, articles and white space; else 0."""
    given = last_answer(policy_turns)
    return float(given is not None and plain(given) in {plain(t) for t in targets(ground_truth)})


def search_format(policy_turns: Sequence[str]) -> float:
    """Return 1 if the policy wrote exactly one `<answer>…</answer>` and only white space after it;
    else 0."""
    whole = "".join(policy_turns)
    marks = whole.count("<answer>") == whole.count("</answer>") == 1
    closed = last_answer(policy_turns) is not None
    return float(marks and closed and not whole.rpartition("</answer>")[2].strip())


def search_retrieval(observations: Sequence[str], ground_truth: GroundTruth) -> float:
    """Return 1 if the tools' output contains a target, compared as `search_answer` does; else 0."""
    told = f" {plain(TAGS.sub(' ', ' '.join(observations)))} "
    wanted = [plain(target) for target in targets(ground_truth)]
    return float(any(_contains(told, target) for target in wanted if target))


def last_answer(policy_turns: Sequence[str]) -> str | None:
    """Return the last answer in any turn. Turns are searched one by one: no tag spans two."""
    found = [answer for turn in policy_turns for answer in ANSWERS.findall(turn)]
    return found[-1] if found else None


def targets(ground_truth: GroundTruth) -> list[str]:
    """Return every text that is right."""
    if isinstance(ground_truth, Mapping):
        if "target" not in ground_truth:
            raise ValueError(f"the ground truth has no target, only {', '.join(ground_truth)}")
        ground_truth = ground_truth["target"]
    return sorted(spellings(ground_truth))


def plain(text: str) -> str:
    """Return text in lower case, without ASCII punctuation and articles, with single spaces, in
    this order. An answer of nothing else, such as the letter A, stays as it is: otherwise no answer
    would be a right one."""
    kept = ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION))
    return " ".join(kept.split()) or text.strip().lower()


def _contains(text: str, target: str) -> bool:
    """Return whether the target is in the text: as whole words in a script with spaces between
    words, as characters in one without."""
    return f" {target} " in text if target.isascii() else target in text


# A minus is a sign unless something stands before it that it could be taken from, as in 7-3.
SIGN = r"(?:(?<![A-Za-z0-9)\]])-)?"
NUMBER = re.compile(SIGN + r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)")


def exact_answer(response: str, answer: Answers, finished: bool) -> float:
    """Return 1 for exactly the answer, or one of a list, ended by the model itself; else 0."""
    return float(finished and response in spellings(answer))


def exact_match(response: str, answer: Answers) -> float:
    """Return 1 if the response is the answer, or one of a list, ignoring case, white space, a full
    stop at the end, and full-width forms; else 0."""
    return float(_normalised(response) in {_normalised(one) for one in spellings(answer)})


def number_match(response: str, answer: Answers, tolerance: int | float = 0) -> float:
    """Return 1 if the last number in the response is the last number in the answer, or in one of a
    list, within `tolerance`; else 0. Thousands may be set off by commas: 1,234.50 is 1234.5."""
    found = [last_number(str(one)) for one in several(answer)]
    right, given = [number for number in found if number is not None], last_number(response)
    if not right:
        raise ValueError(f"the answer {str(answer)[:60]!r} holds no number")
    if given is None:
        return 0.0
    return float(any(abs(given - number) <= Decimal(str(tolerance)) for number in right))


def math_verify(response: str, answer: Answers) -> float:
    """Return 1 if the response's final expression equals the answer, or one of a list, as
    mathematics (library math-verify: LaTeX, fractions, sets, `\\boxed{}`); else 0."""
    import math_verify

    # Its own time limits are off, as they would silently turn a slow row into a wrong one;
    # reward.timeout_seconds names the row. (None switches them off, though typed as int.)
    untimed: dict[str, Any] = {"parsing_timeout": None}
    parsed = [math_verify.parse(_as_mathematics(one), **untimed) for one in several(answer)]
    right = [one for one in parsed if one]
    if not right:
        raise ValueError(f"the answer {str(answer)[:60]!r} is not mathematics")
    given = math_verify.parse(response, **untimed)
    return float(any(math_verify.verify(one, given, timeout_seconds=None) for one in right))


def regex(response: str, pattern: str) -> float:
    """Return 1 if the regular expression `pattern` is found in the response; else 0."""
    return float(re.search(pattern, response) is not None)


def length(response: str, at_most: int | float, at_least: int | float = 0) -> float:
    """Return 1 if the response has `at_least` to `at_most` characters; outside, the shorter of the
    two lengths divided by the longer."""
    size = len(response)
    if size < at_least:
        return size / at_least
    return 1.0 if size <= at_most else at_most / size


def follows_format(
    response: str, tags: Sequence[str] | None = None, pattern: str | None = None
) -> float:
    """Return 1 if the whole response is the `tags` in this order, each once and closed, with only
    white space between them: `<think>…</think> <answer>…</answer>`. With `pattern`, return 1 if the
    whole response matches it. Else 0."""
    if pattern is not None:
        return float(re.fullmatch(pattern, response, re.DOTALL) is not None)
    if tags is None:
        raise ValueError("the rule format needs tags or a pattern")
    blocks = [f"<{re.escape(tag)}>.*?</{re.escape(tag)}>" for tag in tags]
    whole = re.fullmatch(r"\s*".join(["", *blocks, ""]), response, re.DOTALL)
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    return float(whole is not None and all(response.count(mark) == 1 for mark in marks))


def sentiment(response: str) -> float:
    """Return the compound score of the VADER lexicon, from -1 (bad) to 1 (good); 0 for a text
    without a word of feeling (Hutto & Gilbert 2014)."""
    return float(_vader().polarity_scores(response)["compound"])


@cache
def _vader() -> Any:
    """Read the lexicon once per process."""
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()


def repetition(response: str, words: int = 2) -> float:
    """Return the share of the response's runs of `words` words that stood in it before, ignoring
    case and punctuation: 0 for a text that never repeats itself. Give it a negative weight."""
    spoken = re.findall(r"\w+(?:['’]\w+)*", response.casefold())
    runs = [tuple(spoken[i : i + words]) for i in range(len(spoken) - words + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def reasoning_gym(response: str, reasoning_gym: Mapping[str, Any]) -> float:
    """Return what reasoning-gym itself gives for the answer: what is between <answer> and
    </answer>, or else the whole response. Rows of `data.train: reasoning_gym:NAME` fit it."""
    where = dict(reasoning_gym)
    family = _family(where["family"], where["seed"], where["size"], json.dumps(where["arguments"]))
    return float(family.score_answer(tagged_answer(response), family[where["index"]]))


def tagged_answer(response: str) -> str:
    """Return the last answer between tags, or the whole text, without the space around it."""
    return (re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL) or [response])[-1].strip()


@functools.lru_cache(maxsize=64)
def _family(name: str, seed: int, size: int, arguments: str) -> Any:
    return reasoning_gym_family(name, seed, size, json.loads(arguments))


RULES: dict[str, Callable[..., float]] = {
    "exact_answer": exact_answer,
    "exact_match": exact_match,
    "number_match": number_match,
    "math_verify": math_verify,
    "regex": regex,
    "length": length,
    "format": follows_format,
    "sentiment": sentiment,
    "repetition": repetition,
    "constraints": constraints,
    "all_constraints": all_constraints,
    "search_answer": search_answer,
    "search_format": search_format,
    "search_retrieval": search_retrieval,
    "reasoning_gym": reasoning_gym,
}

# What a response's answer is, by rule, from the policy's turns: responses with the same one agree.
ANSWERS_OF: dict[str, Callable[[Sequence[str]], str | None]] = {
    "exact_answer": lambda turns: "".join(turns),
    "exact_match": lambda turns: _normalised("".join(turns)),
    "number_match": lambda turns: _number_text("".join(turns)),
    "search_answer": lambda turns: _plain_answer(turns),
    "reasoning_gym": lambda turns: tagged_answer("".join(turns)),
}


def _number_text(response: str) -> str | None:
    """Return the last number so that 5, 5.0 and 5.00 are the same text."""
    number = last_number(response)
    return None if number is None else str(number.normalize())


def _plain_answer(policy_turns: Sequence[str]) -> str | None:
    answer = last_answer(policy_turns)
    return None if answer is None else plain(answer)


def check_constants(kind: str, arguments: Mapping[str, Any]) -> None:
    """Refuse, before training, constants that would make a rule fail on every row."""
    if kind == "format" and ("tags" in arguments) == ("pattern" in arguments):
        raise UserError("The rule format needs either `tags` or `pattern` in its arguments.")
    if kind == "format" and not _is_names(arguments.get("tags", ["any"])):
        raise UserError("The rule format needs `tags` as a list of names: [think, answer].")
    if kind == "sentiment" and find_spec("vaderSentiment") is None:
        raise UserError(
            "The rule sentiment needs the package vaderSentiment, the extra `sentiment`: "
            "pip install '.[sentiment]' in the checkout."
        )
    words = arguments.get("words", 1) if kind == "repetition" else 1
    if isinstance(words, bool) or not isinstance(words, int) or words < 1:
        raise UserError(f"The rule repetition needs 1 or more for words, not {words!r}.")
    pattern = arguments.get("pattern") if kind in ("regex", "format") else None
    try:
        re.compile("" if pattern is None else pattern)
    except (re.error, TypeError) as error:
        raise UserError(f"The rule {kind} cannot read its pattern {pattern!r}: {error}.") from None
    for name in ("at_most", "at_least", "tolerance"):
        value = arguments.get(name, 0)
        if kind in RULES and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise UserError(f"The rule {kind} needs a number for {name}, not {value!r}.")


def warm_up(kind: str) -> None:
    """Import what takes long, before the first row's time limit starts."""
    if kind == "reasoning_gym":
        importlib.import_module("reasoning_gym")
    if kind == "math_verify":
        import math_verify  # noqa: F401

        # It warns on every row that its time limit is off; reward.log is for the user's prints.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
    if kind == "sentiment":
        _vader()


def last_number(text: str) -> Decimal | None:
    """Return the last number in a text, if there is one."""
    found = NUMBER.findall(unicodedata.normalize("NFKC", text).replace("\u2212", "-"))
    return Decimal(found[-1].replace(",", "")) if found else None


def _normalised(text: str) -> str:
    plain = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return plain.rstrip(".。 ")


def _as_mathematics(answer: Answer) -> str:
    text = str(answer)
    return text if "$" in text or "\\boxed" in text else f"${text}$"


def _is_names(tags: object) -> bool:
    return isinstance(tags, list) and bool(tags) and all(isinstance(tag, str) for tag in tags)
