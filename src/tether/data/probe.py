"""The files of a probe: what a model is asked before and after it is trained on something else.

A probe is a folder of three files of JSON lines; any of them may be missing:

    facts.jsonl      {"question": "…", "choices": ["…", "…"], "answer": 1}   by number, from 0
    text.jsonl       {"text": "…"}
    questions.jsonl  {"question": "…"}
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tether import assets
from tether.data.files import BadRow, read_file
from tether.data.messages import check_text
from tether.errors import UserError

FACTS, TEXT, QUESTIONS = "facts.jsonl", "text.jsonl", "questions.jsonl"


@dataclass(frozen=True)
class Fact:
    """A question with several answers, of which one is right."""

    question: str
    choices: tuple[str, ...]
    answer: int
    subject: str = ""


@dataclass(frozen=True)
class Probe:
    facts: list[Fact]
    texts: list[str]
    questions: list[str]


def read_probe(folder: str) -> Probe:
    """Read a probe; a broken item is refused with its file and line."""
    path = assets.resolve(folder)
    names = [name for name in (FACTS, TEXT, QUESTIONS) if (path / name).is_file()]
    if not names:
        raise UserError(
            f"{folder} is not a probe{assets.looked_at(folder)}: it has none of {FACTS}, {TEXT} "
            f"and {QUESTIONS}; write its folder, or tether:probe."
        )
    readers = {FACTS: _fact, TEXT: _text("text"), QUESTIONS: _text("question")}
    found = {name: _read(path / name, readers[name]) if name in names else [] for name in readers}
    return Probe(found[FACTS], found[TEXT], found[QUESTIONS])


def _read(path: Path, reader: Any) -> list[Any]:
    found = []
    for row in read_file(str(path)):
        try:
            if row.problem is not None:
                raise row.problem
            found.append(reader(row.columns))
        except BadRow as problem:
            raise UserError(f"{row.place}: {problem}") from None
    return found


def _text(name: str) -> Any:
    def read(row: dict[str, Any]) -> str:
        if not isinstance(row.get(name), str):
            raise BadRow(f'it has no {name}; write {{"{name}": "…"}}.')
        check_text(f"the {name}", row[name])
        return row[name]

    return read


def _fact(row: dict[str, Any]) -> Fact:
    question = _text("question")(row)
    choices, answer = row.get("choices"), row.get("answer")
    if not isinstance(choices, list) or not all(isinstance(c, str) and c.strip() for c in choices):
        raise BadRow("its choices are not a list of texts; write two or more.")
    if len(choices) < 2 or len(set(choices)) < len(choices):
        raise BadRow("it needs two or more choices, each of them once.")
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise BadRow(
            f"its answer is {answer!r:.40}; write the right choice's number, 0 to "
            f"{len(choices) - 1}."
        )
    return Fact(question, tuple(choices), answer, str(row.get("subject", "")))
