"""scripts/yardsticks.py: results are kept, what cannot be had says so, the page is whole."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from helpers import table as rows_of

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def script(monkeypatch):
    """A script as a module; scripts find each other by name, as when they are run."""
    monkeypatch.syspath_prepend(str(SCRIPTS))

    def load(name: str):
        spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


def test_a_stopped_measurement_goes_on_where_it_stopped(script, tmp_path):
    store = script("yardstick_store").Store(tmp_path / "kept")
    calls = []

    def measure(seed: int) -> dict:
        calls.append(seed)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return {"score": seed * 10}

    def all_three() -> list[int]:
        return [
            store.measured("Y", {"seed": s}, lambda s=s: measure(s), ["scripts"])["score"]
            for s in (1, 2, 3)
        ]

    with pytest.raises(KeyboardInterrupt):
        all_three()
    assert all_three() == [10, 20, 30]
    assert calls == [1, 2, 2, 3]  # the first was not measured again
    assert {p.suffix for p in store.folder.iterdir()} == {".json"}


def test_other_settings_are_measured_anew_and_a_result_says_what_it_was(script, tmp_path):
    store = script("yardstick_store").Store(tmp_path)
    for lr in (0.1, 0.2, 0.1):
        store.measured("Y", {"lr": lr}, lambda lr=lr: {"score": lr}, ["scripts"])
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2
    kept = json.loads(store.path("Y", {"lr": 0.2}).read_text(encoding="utf-8"))
    assert kept["settings"] == {"lr": 0.2}
    assert kept["score"] == 0.2
    assert kept["seconds"] >= 0
    assert kept["commit"]


@rows_of(
    ("ours", "reached"),
    [
        ((490.0, 6.0), True),
        ((499.0, 0.5), True),  # better than known
        ((480.0, 5.0), True),  # 485 is in 483.92 – 496.16
        ((480.0, 3.0), False),
    ],
)
def test_an_interval_that_overlaps_or_lies_above_is_enough(script, ours, reached):
    control = script("yardstick_control")
    assert control.overlaps_or_better(ours, (490.04, 6.12)) is reached


def test_a_missing_package_is_named_in_its_row_and_the_others_run(script, tmp_path, monkeypatch):
    yardsticks = script("yardsticks")
    there = yardsticks.Row("Y8", yardsticks.NAMES["Y8"], "known", "ours", True)

    def absent(store):
        raise yardsticks.NotThere("gymnasium is not installed: pip install -e '.[yardsticks]'")

    parts = {"Y1": absent, "Y8": lambda store: yardsticks.Outcome([there])}
    monkeypatch.setattr(yardsticks, "PARTS", parts)
    pages = {"en": (tmp_path / "results.md", tmp_path / "README.md")}
    for page in pages["en"]:
        page.write_text(f"before\n<!-- {yardsticks.MARKER} -->\nold\n<!-- end -->\nafter\n")
    monkeypatch.setattr(yardsticks, "PAGES", pages)
    assert yardsticks.main(["--folder", str(tmp_path)]) == 0
    text = pages["en"][0].read_text()
    assert "| Y1 | classic control |  | not measured |  |  | gymnasium is not installed" in text
    assert "| Y8 | Schulman's table of k1, k2, k3 | known | ours | yes |" in text
    assert text.startswith("before\n")
    assert text.endswith("<!-- end -->\nafter\n")
    assert "old" not in text
    assert "gymnasium" not in pages["en"][1].read_text()  # notes are for the page


def test_a_part_that_falls_short_exits_with_1_and_pastes_no_page_when_alone(script, monkeypatch):
    yardsticks = script("yardsticks")
    short = yardsticks.Row("Y8", yardsticks.NAMES["Y8"], "1", "0", False)
    monkeypatch.setattr(yardsticks, "PARTS", {"Y8": lambda store: yardsticks.Outcome([short])})
    monkeypatch.setattr(yardsticks, "write_pages", lambda outcomes: pytest.fail("pasted"))
    assert yardsticks.main(["--only", "Y8"]) == 1


def test_what_is_only_reported_is_no_failure_and_its_table_is_pasted(script, tmp_path, monkeypatch):
    yardsticks = script("yardsticks")
    row = yardsticks.Row("Y5", yardsticks.NAMES["Y5"], "k", "o", False, promised=False)
    details = script("yardstick_store").Details({"en": ["KL", "English"]}, [["k1 | reward", "90%"]])
    outcome = yardsticks.Outcome([row], details=details)
    monkeypatch.setattr(yardsticks, "PARTS", {"Y5": lambda store: outcome})
    page, readme = tmp_path / "results.md", tmp_path / "README.md"
    marks = [yardsticks.MARKER, "Y5: made by `make yardsticks`"]
    page.write_text("".join(f"<!-- {mark} -->\nold\n<!-- end -->\n" for mark in marks))
    readme.write_text(f"<!-- {marks[0]} -->\n<!-- end -->\n")
    monkeypatch.setattr(yardsticks, "PAGES", {"en": (page, readme)})
    assert yardsticks.main(["--results", str(tmp_path), "--kept"]) == 0
    assert "| KL | English |\n| --- | --- |\n| k1 / reward | 90% |" in page.read_text()
    assert "old" not in page.read_text()
    assert "| Y5 | order of KL placements | k | o | no |" in readme.read_text()


def test_a_row_may_stay_out_of_the_readme(script):
    yardsticks = script("yardsticks")
    row = yardsticks.Row("Y8", {"en": "a"}, "k", "o", True, in_readme=False)
    assert len(yardsticks.short_table([row], "en")) == 2  # head and the line below it


def test_the_readme_gets_at_most_ten_lines(script):
    yardsticks = script("yardsticks")
    rows = [yardsticks.Row("Y1", {"en": "a | b"}, "k", "o", True, 3.0, {"en": "n"})] * 30
    lines = yardsticks.short_table(rows[:1], "en")
    assert lines[-1] == "| Y1 | a / b | k | o | yes |"
    assert len(yardsticks.short_table(rows, "en")) == 10


@rows_of("page", ["docs/results.md", "docs/zh/results.md", "README.md", "README.zh-CN.md"])
def test_every_page_has_its_place_for_the_table(script, page):
    text = (SCRIPTS.parent / page).read_text(encoding="utf-8")
    assert text.count(f"<!-- {script('yardsticks').MARKER} -->") == 1


@rows_of("page", ["docs/results.md", "docs/zh/results.md"])
def test_every_part_with_a_table_of_its_own_has_its_place(script, page):
    text = (SCRIPTS.parent / page).read_text(encoding="utf-8")
    for part in ("Y3", "Y4", "Y5", "Y6", "Y7"):
        assert text.count(f"<!-- {part}: made by `make yardsticks` -->") == 1


def test_schulmans_table_is_exact(script, tmp_path):
    yardsticks = script("yardsticks")
    [row] = yardsticks.schulman(yardsticks.Store(tmp_path)).rows
    assert row.reached
    assert row.known == "12 numbers in closed form"
