"""A long run: ten thousand iterations, a million tokens in its rows."""

import json
import os
import time
from pathlib import Path

import pytest

from tests.browser.conftest import served, wait_until
from tests.browser.hostile import row_of, write

ITERATIONS = 10_000
FILES, ROWS, TOKENS = 1_000, 64, 16


@pytest.fixture(scope="module")
def long_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    run = folder / "long"
    (run / "rollouts").mkdir(parents=True)
    (run / "config.yaml").write_text(f"schema: 1\ntrain: {{iterations: {ITERATIONS}}}\n")
    names = ["score/mean", "kl/sequence_mean", "actor/entropy", "actor/pg_loss", "critic/vf_loss"]
    names += [f"extra/metric_{i}" for i in range(35)]
    with (run / "metrics.jsonl").open("w") as file:
        for i in range(ITERATIONS):
            values = {name: (i * (k + 3) % 977) / 977 for k, name in enumerate(names)}
            file.write(json.dumps({"schema": 1, "iteration": i, **values}) + "\n")
    for name in ("timings", "evals", "events"):
        (run / f"{name}.jsonl").touch()
    first = run / "rollouts" / "000000.jsonl"
    write(first, [row_of(i, f"prompt {i}", [f"t{j}" for j in range(TOKENS)]) for i in range(ROWS)])
    for i in range(1, FILES):
        os.link(first, run / "rollouts" / f"{i * 10:06d}.jsonl")
    return folder


def test_the_first_curve_of_a_long_run_is_there_in_seconds(page, long_run, capsys):
    with served(long_run) as address:
        began = time.perf_counter()
        page.goto(address, wait_until="commit")
        page.locator(".chart .js-plotly-plot path.js-line").first.wait_for(state="attached")
        seconds = time.perf_counter() - began
        with capsys.disabled():
            print(f"\nfirst curve of {ITERATIONS} iterations after {seconds:.2f} s")
        assert seconds < 10, "about 2 s on a quiet machine; another worker tests beside this one"
        points = page.evaluate("document.querySelector('.js-plotly-plot').data[0].x.length")
        assert 1000 <= points <= 4000, "thinned, and still a curve"

        began = time.perf_counter()
        page.evaluate("location.hash = '#/run/long/iteration/last'")
        page.locator(".rows tbody tr").nth(ROWS - 1).wait_for(state="attached")
        assert time.perf_counter() - began < 10
        box = page.locator(".scroll.tall")
        box.evaluate("e => { e.scrollTop = 400 }")
        wait_until(page, "document.querySelector('.scroll.tall').scrollTop === 400")


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
