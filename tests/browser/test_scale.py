"""A long run: ten thousand iterations, a million tokens in its rows.

The bounds of a quiet machine are those of scripts/measure_page.py.
"""

import sys
import time
from pathlib import Path

import pytest

from tests.browser.conftest import served, wait_until
from tests.browser.hostile import row_of, write

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
BESIDE_OTHERS = 5  # times as long as alone: another worker tests beside this one


@pytest.fixture(scope="module")
def measure_page():
    """scripts/measure_page.py, which makes such a run and knows every view; skips without it."""
    pytest.importorskip("playwright.sync_api")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        import measure_page
    yield measure_page
    for name in ("measure_page", "measure", "take_screenshots"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def long_run(measure_page, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    measure_page.make_long_run(folder / "other", seed=1, iterations=1000)
    measure_page.make_long_run(folder / "long")
    return folder


def test_the_first_curve_of_a_long_run_is_there_in_seconds(page, long_run, measure_page, capsys):
    iterations, rows = measure_page.ITERATIONS, measure_page.ROWS
    assert measure_page.FILES * rows * measure_page.TOKENS > 1_000_000
    with served(long_run) as address:
        began = time.perf_counter()
        page.goto(address, wait_until="commit")
        page.locator(".chart .js-plotly-plot path.js-line").first.wait_for(state="attached")
        seconds = time.perf_counter() - began
        with capsys.disabled():
            print(f"\nfirst curve of {iterations} iterations after {seconds:.2f} s")
        assert seconds < BESIDE_OTHERS * measure_page.FIRST_SECONDS
        points = page.evaluate("document.querySelector('.js-plotly-plot').data[0].x.length")
        assert 1000 <= points <= 4000, "thinned, and still a curve"

        began = time.perf_counter()
        page.evaluate("location.hash = '#/run/long/iteration/last'")
        page.locator(".rows tbody tr").nth(rows - 1).wait_for(state="attached")
        assert time.perf_counter() - began < 10
        box = page.locator(".scroll.tall")
        box.evaluate("e => { e.scrollTop = 400 }")
        wait_until(page, "document.querySelector('.scroll.tall').scrollTop === 400")


@pytest.mark.long
def test_every_view_of_a_long_run_is_there_at_once(browser, long_run, measure_page, capsys):
    with served(long_run) as address:
        found = measure_page.measure(browser, address)
    with capsys.disabled():
        print("\n" + "\n".join(f"{seconds:6.2f} s  {name}" for name, seconds in found))
    assert len(found) > 20
    assert measure_page.too_slow([(name, s / BESIDE_OTHERS) for name, s in found]) == []


def test_what_is_too_slow_is_named(measure_page):
    assert measure_page.too_slow([("first", 1.9), ("second", 0.4)]) == []
    assert measure_page.too_slow([("first", 2.1), ("second", 0.6)]) == ["first", "second"]


@pytest.mark.long
def test_thousands_of_rows_of_one_iteration_are_paged(page, tmp_path):
    run = tmp_path / "wide"
    (run / "rollouts").mkdir(parents=True)
    (run / "config.yaml").write_text("schema: 1\n")
    write(run / "metrics.jsonl", [{"iteration": 0, "score/mean": 1.0}])
    rows = [row_of(i, f"prompt {i}", ["a"]) for i in range(5000)]
    write(run / "rollouts" / "000000.jsonl", rows)
    with served(tmp_path) as address:
        page.goto(f"{address}/#/run/wide/iteration/0")
        page.get_by_text("1–200 of 5000 rows").wait_for()
        assert page.locator(".rows tbody tr").count() == 200
        page.locator(".bar").last.get_by_role("button", name="Next").click()
        page.get_by_text("201–400 of 5000 rows").wait_for()
        page.get_by_label("Text contains").fill("prompt 4999")
        page.get_by_text("1–1 of 1 rows").wait_for()
