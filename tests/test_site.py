"""The documentation as a site: every page is in it, and a newcomer finds a path.

tests/browser/test_site.py builds it; links within docs/ are checked in tests/test_guide.py.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
MADE = {"reference/api.md", "reference/algo.md"}  # by scripts/site_hooks.py


class Loader(yaml.SafeLoader):
    """mkdocs.yml names a Python function, which is of no interest here."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def pages(nav: object) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from pages(item)


def listed() -> list[str]:
    return list(pages(yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"]))


def test_every_page_is_in_the_navigation_once():
    found = listed()
    assert len(found) == len(set(found))
    own = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    outside = {page for page in found if page.startswith("source/")} | MADE
    assert set(found) == own | outside
    assert all((ROOT / page.removeprefix("source/")).is_file() for page in outside - MADE)


def test_a_newcomer_has_a_path_in_both_languages():
    for page, steps in (("learn.md", ("Five minutes", "One hour", "One day")),
                        ("zh/learn.md", ("五分钟", "一小时", "一天"))):  # fmt: skip
        headings = re.findall(r"^## (.+)$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert [h for h, step in zip(headings, steps, strict=False) if h.startswith(step)]
        assert len(headings) >= len(steps)
