"""The page over a run that is going on."""

import pytest

from tests.browser.conftest import ITERATIONS, log_of, served, trained, wait_until

POINTS = "document.querySelector('.chart .js-plotly-plot')?.data?.[0].x.length ?? 0"


@pytest.mark.long
def test_a_curve_grows_while_the_run_goes_on_and_only_new_lines_are_asked_for(page, tmp_path):
    since = []

    def note(request) -> None:
        if "since=" in request.url:
            since.append(int(request.url.split("since=")[1].split("&")[0]))

    page.on("request", note)
    with served(tmp_path) as address, trained(tmp_path / "live", iterations=500) as process:
        page.goto(address)  # before there is a run
        while not (tmp_path / "live" / "metrics.jsonl").exists():
            assert process.poll() is None, log_of(tmp_path / "live").read_text()
            page.wait_for_timeout(200)
        wait_until(page, f"({POINTS}) >= 1", seconds=60)
        page.get_by_text("running").wait_for()
        first = page.evaluate(POINTS)
        wait_until(page, f"({POINTS}) > {first}", seconds=60)
        second = page.evaluate(POINTS)
        wait_until(page, f"({POINTS}) > {second}", seconds=60)
        assert process.poll() is None, "it is still going on"
        x = page.evaluate("document.querySelector('.chart .js-plotly-plot').data[0].x")
    assert x == list(range(len(x))), "no iteration twice, none missing"
    assert since[0] == 0
    assert first in since
    assert since == sorted(since)


def test_the_finished_run_says_so_and_is_left_alone(page, run, address):
    questions = []
    page.goto(address)
    page.locator(".run .finished").wait_for()
    wait_until(page, f"({POINTS}) === {ITERATIONS}")
    page.on("request", lambda request: questions.append(request.url))
    page.wait_for_timeout(2500)
    assert any(url.endswith("/api/runs") for url in questions)
    assert not any("series" in url for url in questions)


def test_a_file_that_was_cut_back_is_drawn_anew(page, run, address):
    page.goto(address)
    wait_until(page, f"({POINTS}) === {ITERATIONS}")
    metrics = run / "metrics.jsonl"
    whole = metrics.read_bytes()
    try:
        metrics.write_bytes(b"".join(whole.splitlines(keepends=True)[:5]))
        wait_until(page, f"({POINTS}) === 5")
    finally:
        metrics.write_bytes(whole)
    wait_until(page, f"({POINTS}) === {ITERATIONS}")
    assert page.evaluate(POINTS) == ITERATIONS


@pytest.mark.long
def test_a_server_that_is_gone_is_missed_and_found_again(page, run, address):
    page.goto(address)
    wait_until(page, f"({POINTS}) === {ITERATIONS}")
    page.route("**/api/**", lambda route: route.abort())
    page.get_by_text("The server does not answer").wait_for()
    page.unroute("**/api/**")
    page.get_by_text("The server does not answer").wait_for(state="detached")


@pytest.mark.long
def test_a_damaged_line_is_named_and_the_rest_is_drawn(page, run, address):
    metrics = run / "metrics.jsonl"
    whole = metrics.read_bytes()
    lines = whole.splitlines(keepends=True)
    try:
        metrics.write_bytes(b"".join([*lines[:3], b"{broken\n", *lines[4:]]))
        page.goto(address)
        page.get_by_text("line 4").wait_for()
        wait_until(page, f"({POINTS}) === {ITERATIONS - 1}")
    finally:
        metrics.write_bytes(whole)
