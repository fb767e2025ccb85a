"""The worked examples as text: what tether computes, the right answer, a common mistake."""

import math
from itertools import groupby
from typing import Any

from tether.explain.document import Section, Table
from tether.explain.example_sums import DISTRIBUTIONS
from tether.explain.examples import EXAMPLES, TOLERANCE, Example
from tether.explain.words import Language, say
from tether.run.directory import SCHEMA

TOKENS = ["t1", "t2", "t3", "t4", "t5", "t6"]


def failures() -> list[Example]:
    """List the examples that tether gets wrong; NaN is wrong too."""
    return [example for example in EXAMPLES if not example.difference() <= TOLERANCE]


def record(language: Language) -> dict[str, Any]:
    """Return all examples as plain data for JSON."""
    return {
        "schema": SCHEMA,
        "tolerance": TOLERANCE,
        "examples": [
            {
                "id": e.id,
                "section": say(f"title_{e.section}", language),
                "example": say(f"example_{e.name}", language),
                "quantity": say(f"of_{e.quantity}", language),
                "computed": [_finite(x) for x in e.computed()],
                "right": [_finite(x) for x in e.right],
                "difference": _finite(e.difference()),
                "agrees": e.difference() <= TOLERANCE,
                "mistake": say(f"mistake_{e.mistake}", language) if e.mistake else None,
            }
            for e in EXAMPLES
        ],
    }


def tell_examples(language: Language) -> list[Section]:
    """Return all examples as sections of a document, the verdict last."""
    sections = [
        _section(name, list(examples), language)
        for name, examples in groupby(EXAMPLES, key=lambda e: e.section)
    ]
    failed, count = len(failures()), len(EXAMPLES)
    verdict = "differ" if failed else "agree"
    last = say(verdict, language, count=count, failed=failed, tolerance=TOLERANCE)
    return [*sections, Section(last, [])]


def _section(name: str, examples: list[Example], language: Language) -> Section:
    width = max(len(e.right) for e in examples)
    rows = [[say("example", language), "", *_headings(name, width, language)]]
    for e in examples:
        computed, right = _pad(e.computed(), width), _pad(e.right, width)
        rows.append([_label(e, language), say("tether", language), *computed])
        rows.append(["", say("right", language), *right])
    mistakes = {e.mistake: e for e in reversed(examples) if e.mistake}
    return Section(
        say(f"title_{name}", language),
        [
            *(_distributions(e, language) for e in examples if name == "kl"),
            Table(rows, numbers_from=2),
            *(_mistake(e, language) for e in reversed(mistakes.values())),
        ],
    )


def _headings(section: str, width: int, language: Language) -> list[str]:
    """Name the columns of numbers, where they have names of their own."""
    bits = say("bits", language)
    named = {
        "kl": ["KL(P‖Q)", bits, "KL(Q‖P)", bits],
        "schulman": ["k1", "k2", "k3"],
        "prompt": TOKENS,
        "dialogue": TOKENS[:5],
    }
    return named.get(section, [""] * width)


def _label(example: Example, language: Language) -> str:
    """Name the example and its quantity, without the one that the heading already names."""
    name = say(f"example_{example.name}", language)
    quantity = say(f"of_{example.quantity}", language)
    label = {"kl": name, "prompt": quantity, "dialogue": quantity}.get(
        example.section, say("colon", language).join((name, quantity))
    )
    return label if example.difference() <= TOLERANCE else f"{label} ✗"


def _distributions(example: Example, language: Language) -> str:
    p, q = (" ".join(f"{x:.3g}" for x in part) for part in DISTRIBUTIONS[example.name])
    return say("colon", language).join(
        (say(f"example_{example.name}", language), f"P = {p}, Q = {q}")
    )


def _mistake(example: Example, language: Language) -> str:
    name = say(f"example_{example.name}", language)
    text = say(f"mistake_{example.mistake}", language)
    return say("common_mistake", language, name=name, text=text)


def _pad(numbers: list[float] | tuple[float, ...], width: int) -> list[str]:
    shown = [number(x) for x in numbers]
    return shown + [""] * (width - len(shown))


def number(x: float) -> str:
    """Format with six decimals, or eight where six would hide part of a small number."""
    if math.isinf(x):
        return "∞"
    hidden = abs(x) < 1e-3 and abs(round(x, 6) - x) > 1e-10
    return f"{x + 0.0:.8f}" if hidden else f"{x + 0.0:.6f}"


def _finite(x: float) -> float | None:
    """Return None for an infinity or NaN, which JSON does not have."""
    return x if math.isfinite(x) else None
