"""Right answers as data rows have them: text, a number, or a list of which any will do."""

from collections.abc import Sequence

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
    """Return every text that is one of the answers: the number 2.0 is written 2.0 or 2."""
    found = set()
    for one in several(answers):
        found.add(str(one))
        if isinstance(one, bool):
            found.add(str(one).lower())
        elif isinstance(one, float) and one.is_integer():
            found.add(str(int(one)))
    return found
