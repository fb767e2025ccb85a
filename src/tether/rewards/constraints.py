"""Constraints on a response that a program can verify, in the manner of IFEval. No torch.

A constraint is an object of a data row, {"kind": "max_words", "value": 12}; `value` is a number, a
text, a list of texts, or absent, as the kind needs (Zhou et al. 2023).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

WORD = re.compile(r"\w+(?:['’\-]\w+)*")
SENTENCE = re.compile(r"[^.!?。！？]*\w[^.!?。！？]*[.!?。！？]+")
BULLET = re.compile(r"^\s*[-*•]\s+\S", re.MULTILINE)
TITLE = re.compile(r"<<[^<>\n]+>>")


def words_of(text: str) -> list[str]:
    return WORD.findall(text)


def max_words(response: str, value: int) -> bool:
    """At most so many words, and at least one."""
    return 1 <= len(words_of(response)) <= value


def min_words(response: str, value: int) -> bool:
    """At least so many words."""
    return len(words_of(response)) >= value


def sentences(response: str, value: int) -> bool:
    """Exactly so many sentences, each ended by a full stop, a question or an exclamation mark."""
    rest = SENTENCE.sub("", response)
    return len(SENTENCE.findall(response)) == value and not words_of(rest)


def bullets(response: str, value: int) -> bool:
    """Exactly so many lines that begin with -, * or •, and no other lines."""
    lines = [line for line in response.splitlines() if line.strip()]
    return len(lines) == value and all(BULLET.match(line) for line in lines)


def lowercase(response: str) -> bool:
    """Letters, and none of them a capital."""
    return any(c.isalpha() for c in response) and response == response.lower()


def uppercase(response: str) -> bool:
    """Letters, and all of them capitals."""
    return any(c.isalpha() for c in response) and response == response.upper()


def no_commas(response: str) -> bool:
    """Words, and no comma between them."""
    return bool(words_of(response)) and not any(comma in response for comma in ",，、")


def begins_with(response: str, value: str) -> bool:
    """The first words are these, in any case."""
    return _begins(words_of(response), words_of(value))


def ends_with(response: str, value: str) -> bool:
    """The last words are these, in any case; punctuation may follow."""
    return _begins(words_of(response)[::-1], words_of(value)[::-1])


def contains(response: str, value: str) -> bool:
    """This word is in it, as a whole word and in any case."""
    return value.casefold() in {word.casefold() for word in words_of(response)}


def avoids(response: str, value: str) -> bool:
    """Words, and this one is not among them."""
    return bool(words_of(response)) and not contains(response, value)


def quoted(response: str) -> bool:
    """Double quotation marks around it all, and none inside."""
    text = response.strip()
    marks = [('"', '"'), ("“", "”")]
    inside = text[1:-1]
    closed = any(text.startswith(a) and text.endswith(b) for a, b in marks)
    return closed and bool(words_of(inside)) and not any(m in inside for m in '"“”')


def language(response: str, value: str) -> bool:
    """Letters of this language's script alone: english, chinese or russian."""
    letters = [c for c in response if c.isalpha()]
    return bool(letters) and all(SCRIPTS[value](c) for c in letters)


def json_keys(response: str, value: Sequence[str]) -> bool:
    """A JSON object with exactly these keys, and nothing around it."""
    try:
        found = json.loads(response)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and sorted(found) == sorted(value)


def title(response: str) -> bool:
    """Exactly one title in double angular brackets: <<a title>>."""
    return len(TITLE.findall(response)) == 1


def no_letter(response: str, value: str) -> bool:
    """Words, none of which has this letter, large or small."""
    return bool(words_of(response)) and value.casefold() not in response.casefold()


SCRIPTS: dict[str, Callable[[str], bool]] = {
    "english": lambda c: c.isascii(),
    "chinese": lambda c: "\u4e00" <= c <= "\u9fff",
    "russian": lambda c: "\u0400" <= c <= "\u04ff",
}
KINDS: dict[str, Callable[..., bool]] = {
    "max_words": max_words,
    "min_words": min_words,
    "sentences": sentences,
    "bullets": bullets,
    "lowercase": lowercase,
    "uppercase": uppercase,
    "no_commas": no_commas,
    "begins_with": begins_with,
    "ends_with": ends_with,
    "contains": contains,
    "avoids": avoids,
    "quoted": quoted,
    "language": language,
    "json_keys": json_keys,
    "title": title,
    "no_letter": no_letter,
}
WITHOUT_VALUE = ("lowercase", "uppercase", "no_commas", "quoted", "title")
NUMBERED = ("max_words", "min_words", "sentences", "bullets")


def kept(response: str, constraint: Mapping[str, Any]) -> bool:
    """Return whether a response keeps a constraint; a broken constraint raises `ValueError`."""
    _check(constraint)
    kind = constraint["kind"]
    given = () if kind in WITHOUT_VALUE else (constraint["value"],)
    return KINDS[kind](response, *given)


def constraints(response: str, constraints: Sequence[Mapping[str, Any]], finished: bool) -> float:
    """Return the share of the row's `constraints` that the response keeps; 0 if it was cut off. One
    of them is {"kind": "max_words", "value": 12}."""
    found = _all_kept(response, constraints)
    return sum(found) / len(found) if finished else 0.0


def all_constraints(
    response: str, constraints: Sequence[Mapping[str, Any]], finished: bool
) -> float:
    """Return 1 if the response keeps every one of the row's `constraints` and was not cut off; else
    0."""
    return float(finished and all(_all_kept(response, constraints)))


def _all_kept(response: str, constraints: Sequence[Mapping[str, Any]]) -> list[bool]:
    if not isinstance(constraints, list) or not constraints:
        raise ValueError(
            'the constraints are not a list; write [{"kind": "max_words", "value": 9}]'
        )
    return [kept(response, constraint) for constraint in constraints]


def _check(constraint: Any) -> None:
    kind = constraint.get("kind") if isinstance(constraint, Mapping) else None
    if kind not in KINDS:
        raise ValueError(
            f"the constraint {constraint!r:.80} has none of the kinds {', '.join(KINDS)}"
        )
    value = constraint.get("value")
    if kind in WITHOUT_VALUE:
        good = value is None
    elif kind in NUMBERED:
        good = isinstance(value, int) and not isinstance(value, bool) and value > 0
    elif kind == "json_keys":
        good = isinstance(value, list) and bool(value) and all(isinstance(k, str) for k in value)
    elif kind == "language":
        good = value in SCRIPTS
    else:
        good = isinstance(value, str) and bool(value.strip())
    if not good:
        raise ValueError(f"the constraint {kind} cannot have the value {value!r:.40}")


def _begins(words: list[str], wanted: list[str]) -> bool:
    folded = [word.casefold() for word in words[: len(wanted)]]
    return bool(wanted) and folded == [word.casefold() for word in wanted]
