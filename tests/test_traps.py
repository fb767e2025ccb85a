"""docs/traps.md has the traps that test docstrings cite, and names tests that exist."""

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PAGE = (TESTS.parent / "docs" / "traps.md").read_text(encoding="utf-8")
HEADING = re.compile(r"^## (\d+)\. ", re.MULTILINE)


def sources() -> str:
    paths = sorted(TESTS.rglob("*.py"))
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


def test_every_trap_that_a_test_cites_is_on_the_page():
    listed = [int(number) for number in HEADING.findall(PAGE)]
    assert listed == list(range(1, len(listed) + 1))
    cited = {int(number) for number in re.findall(r"\bTrap (\d+)", sources())}
    assert cited <= set(listed)


def test_every_trap_names_tests_that_exist():
    defined = set(re.findall(r"^def (test_\w+)", sources(), re.MULTILINE))
    sections = re.split(HEADING, PAGE)[1:]
    for number, text in zip(sections[::2], sections[1::2], strict=True):
        named = set(re.findall(r"`(test_\w+)`", text))
        assert named, f"trap {number} names no test"
        assert named <= defined, f"trap {number}: {named - defined}"
