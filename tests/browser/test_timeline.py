"""An iteration in time: samplers, rewards and trainer, in both languages."""

import json

import pytest

from tests.browser.conftest import served, wait_until
from tests.browser.hostile import write

SECONDS = 8.0  # of each iteration, whose rows were sampled during the one before


def make_apart_run(run) -> None:
    """By hand: two samplers at lag 1, one of them lost in between, and an evaluation."""
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("schema: 1\n")
    write(run / "metrics.jsonl", [{"iteration": i, "score/mean": 0.1 * i} for i in range(4)])
    stages = {"rollout": 0.7, "reward": 0.9, "forward": 1.6, "update": 4.6}
    lines = []
    for i in range(4):
        chunks = []
        for n, began in enumerate((0.1, 0.1, 2.2, 2.5, 4.4, 4.8)):
            sampler = f"sampler {n % 2 + 1}" if i < 2 or n % 2 == 0 else "sampler 3"
            chunks.append(
                {
                    "sampler": sampler,
                    "purpose": "token",
                    "iteration": i + 1,
                    "version": i,
                    "rows": [16 * n, 16 * n + 16],
                    "asked": 0.05,
                    "began": began,
                    "ended": began + 2.05,
                    "lost": int(i == 2 and n == 3),
                }
            )
        if i == 2:
            greedy = {**chunks[0], "purpose": "greedy", "iteration": None, "rows": [0, 32]}
            chunks.insert(0, {**greedy, "asked": -1.4, "began": -1.35, "ended": -0.2})
        before = None if i == 0 else (1.5 if i == 2 else 0.1)
        line = {"before": before, "seconds": SECONDS, "stages": stages, "chunks": chunks}
        lines.append({"schema": 1, "iteration": i, **line})
    (run / "samplers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    folder = tmp_path_factory.mktemp("apart")
    make_apart_run(folder / "apart")
    make_apart_run(folder / "<img src=x onerror=window.pwned=1>")
    with served(folder) as address:
        yield address


def edges(page, selector: str) -> list[list[float]]:
    """Where blocks begin and end, as shares of their lane."""
    return page.evaluate(
        "selector => [...document.querySelectorAll(selector)].map(e => {"
        "const [a, b] = [e.getBoundingClientRect(), e.parentElement.getBoundingClientRect()];"
        "return [(a.left - b.left) / b.width, (a.right - b.left) / b.width]})",
        selector,
    )


def test_a_timeline_has_a_lane_for_each_and_blocks_where_they_were(page, apart):
    page.goto(f"{apart}/#/run/apart/timeline/1")
    page.locator(".lanes").wait_for()
    names = page.locator(".lane-name").all_inner_texts()
    assert names == ["sampler 1", "sampler 2", "rewards", "trainer", "chunks that wait"]
    whole = SECONDS + 1.5  # the evaluation is before the next iteration
    [[left, right]] = edges(page, ".lane.rewards .span")
    assert (left, right) == pytest.approx((0.7 / whole, 1.6 / whole), abs=0.003)
    blocks = edges(page, ".lane.sampler .span")
    assert len(blocks) == 7  # six for iteration 2 and the evaluation
    assert blocks[0] == pytest.approx((0.1 / whole, 2.15 / whole), abs=0.003)
    first = page.locator(".lane.sampler .span").first
    assert first.inner_text() == "2 · v1"
    assert "rows 0–15, Iteration 2, weights of version 1" in first.get_attribute("title")
    assert "96 rows by 1" in page.locator(".facts").inner_text()
    page.keyboard.press("]")
    wait_until(page, "document.querySelector('h1').textContent === 'Iteration 2'")
    assert page.locator(".span.lost").count() == 1
    page.locator("summary", has_text="Every chunk (6)").click()
    assert page.locator("details tbody tr").count() == 6


@pytest.mark.long
def test_the_timeline_is_chinese_and_dark_and_follows_the_newest(page, apart):
    page.goto(f"{apart}/#/run/apart/timeline")
    page.locator(".lanes").wait_for()
    assert page.locator("h1").inner_text() == "Iteration 3"
    light = page.evaluate("getComputedStyle(document.querySelector('.span.for0')).backgroundColor")
    page.keyboard.press("l")
    page.locator("h1", has_text="第 3 轮").wait_for()
    assert page.locator(".lane-name").all_inner_texts()[-3:] == ["奖励", "训练", "排队的批次"]
    page.keyboard.press("d")
    wait_until(
        page,
        f"getComputedStyle(document.querySelector('.span.for0')).backgroundColor !== {light!r}",
    )


@pytest.mark.long
def test_names_of_a_run_stay_text_and_a_run_of_one_process_has_one_lane(page, apart, address):
    page.goto(f"{apart}/#/run/%3Cimg%20src%3Dx%20onerror%3Dwindow.pwned%3D1%3E/timeline/0")
    page.locator(".lanes").wait_for()
    assert page.evaluate("window.pwned === undefined && !document.querySelector('img')")
    page.goto(f"{address}/#/run/live/timeline/3")
    page.locator(".lane.trainer .span.samples").wait_for()
    assert page.locator(".lane-name").all_inner_texts() == ["rewards", "trainer"]
