"""Groups, pictures, held-out responses, one prompt's history, filters, the table of runs, keys."""

import csv
import io
import json

import pytest

from tests.browser.conftest import ITERATIONS, wait_until
from tests.helpers import read_jsonl

ITERATION = 5
AT = f"#/run/live/iteration/{ITERATION}"


def saved(page, press) -> bytes:
    with page.expect_download() as download:
        press()
    with open(download.value.path(), "rb") as file:
        return file.read()


def table_of(data: bytes) -> list[list[str]]:
    return list(csv.reader(io.StringIO(data.decode("utf-8-sig"))))


@pytest.fixture
def rows(run) -> list[dict]:
    return read_jsonl(run / "rollouts" / f"{ITERATION:06d}.jsonl")


def test_the_answer_stands_beside_the_response(page, address, rows):
    page.goto(f"{address}/{AT}/row/{rows[0]['row']}")
    page.locator(".data dd").first.wait_for()
    assert page.locator(".beside .data dt").first.inner_text() == "answer"
    assert page.locator(".beside .data dd").first.inner_text() == rows[0]["columns"]["answer"]
    page.goto(f"{address}/{AT}")
    page.locator(".rows tbody tr").first.wait_for()
    heads = page.locator(".rows thead th").all_inner_texts()
    assert heads[3] == "answer"
    shown = page.locator(".rows tbody tr td:nth-child(4)").all_inner_texts()
    assert shown == [row["columns"]["answer"] for row in rows]


def test_rows_are_filtered_by_any_column_and_the_address_keeps_it(page, address, rows):
    page.goto(f"{address}/{AT}")
    page.locator(".rows tbody tr").first.wait_for()
    wanted = rows[0]["columns"]["answer"]
    page.get_by_label("Add a filter").select_option("columns.answer")
    page.get_by_label("answer contains").fill(wanted)
    expected = sum(wanted.lower() in r["columns"]["answer"].lower() for r in rows)
    page.get_by_text(f"1–{expected} of {expected} rows").wait_for()
    page.get_by_label("Add a filter").select_option("length")
    page.get_by_label("length from").fill("999")
    page.get_by_text("No row matches.").wait_for()
    page.reload()
    page.get_by_text("No row matches.").wait_for()
    assert page.get_by_label("length from").input_value() == "999"


@pytest.mark.long
def test_a_press_anywhere_on_a_line_opens_the_row_and_columns_can_be_chosen(page, address):
    page.goto(f"{address}/{AT}")
    page.locator(".rows tbody tr").first.wait_for()
    page.locator(".chooser summary").click()
    page.locator(".chooser label", has_text="finish").click()
    assert "finish" not in page.locator(".rows thead").inner_text()
    page.locator(".chooser summary").click()
    page.locator(".rows tbody td.response").first.click()
    page.locator(".chip").first.wait_for()


def test_the_rows_are_saved_as_csv_with_every_number_in_full(page, address, rows):
    page.goto(f"{address}/{AT}")
    page.locator(".rows tbody tr").first.wait_for()
    heads, *cells = table_of(saved(page, page.get_by_role("button", name="CSV").click))
    assert len(cells) == len(rows)
    at = heads.index("advantage")
    means = [sum(r["advantages"]) / len(r["advantages"]) for r in rows]
    assert [float(row[at]) for row in cells] == pytest.approx(means, rel=1e-6)


def test_a_group_shows_its_samples_side_by_side(page, address, rows):
    page.goto(f"{address}/{AT}?show=groups")
    page.locator(".group").first.wait_for()
    samples = 2  # of the arithmetic recipe
    assert page.locator(".group").count() == len(rows) // samples
    first = page.locator(".group").first
    shown = first.locator(".sample .said").all_inner_texts()
    assert shown == [row["response"] for row in rows[:samples]]
    advantages = first.locator(".sample b[title]").evaluate_all("es => es.map(e => +e.title)")
    means = [sum(r["advantages"]) / len(r["advantages"]) for r in rows[:samples]]
    assert advantages == pytest.approx(means, rel=1e-6)
    page.get_by_label("Sort by").select_option("spread")
    shares = page.locator(".group .facts b:nth-child(1)").all_inner_texts()
    assert shares


def test_histograms_and_the_heat_map_are_drawn_from_the_file(page, address, rows):
    page.goto(f"{address}/{AT}?show=pictures")
    page.locator(".chart .js-plotly-plot").nth(4).wait_for()
    counts = page.evaluate(
        "[...document.querySelectorAll('.chart .js-plotly-plot')]"
        ".map(e => e.data[0].y.reduce((a, b) => a + b, 0))"
    )
    tokens = sum(sum(row["response_mask"]) for row in rows)
    assert counts == [len(rows)] * 3 + [tokens] * 2
    page.get_by_label("Colour by").select_option("values")
    wait_until(page, "document.querySelector('.bar .legend strong')?.textContent === 'values'")
    cells = page.evaluate("document.querySelector('.heat').data[0].z")
    assert cells[0][: len(rows[0]["values"])] == pytest.approx(rows[0]["values"], rel=1e-4)
    assert saved(page, page.locator(".card:has(.heat)").get_by_role("button", name="PNG").click)[
        :4
    ] == (b"\x89PNG")


@pytest.mark.long
def test_what_if_for_the_batch_counts_clipped_tokens(page, address):
    page.goto(f"{address}/{AT}?show=batch")
    page.get_by_text("after equals before").wait_for()

    def clipped() -> list[float]:
        cells = page.locator(".batch .totals tr", has_text="clipped tokens").locator("td")
        return [float(x) for x in cells.evaluate_all("es => es.map(e => e.title)")]

    before, after = clipped()
    assert before == after
    page.locator(".batch").get_by_label("actor.update.eps_high").first.fill("0.0001")
    page.locator(".batch td.differs").first.wait_for()
    before, after = clipped()
    assert after > before
    assert "actor.update.eps_high=0.0001" in page.url


def test_held_out_responses_before_and_after_are_compared(page, run, address):
    early, late = (read_jsonl(run / "evals" / f"{n:06d}.jsonl") for n in (0, ITERATIONS))
    page.goto(f"{address}/#/run/live/heldout")
    page.locator(".rows tbody tr").first.wait_for()
    better = sum(
        b["greedy"]["score"] > a["greedy"]["score"] for a, b in zip(early, late, strict=True)
    )
    page.get_by_text(f"{better} of {len(late)} prompts got a better score").wait_for()
    line = page.locator(".rows tbody tr").first
    number = int(line.locator("a").inner_text())
    texts = line.locator("td").all_inner_texts()
    assert texts[1] == late[number]["prompt"]
    assert texts[3] == early[number]["greedy"]["response"]
    page.get_by_label("decoding").select_option("sampled")
    wait_until(page, "location.hash.includes('decoding=sampled')")
    heads, *cells = table_of(saved(page, page.get_by_role("button", name="CSV").click))
    assert len(cells) == len(late)
    assert "after" in heads
    line.locator("a").click()
    page.locator(".answer").nth(3).wait_for()
    assert page.locator(".answer").count() == 4, "greedy and sampled, before and after"
    assert page.locator(".answer ins, .answer del").count() >= 0


@pytest.mark.long
def test_the_difference_of_two_texts_is_marked_word_by_word(page, address):
    page.goto(address)
    parts = page.evaluate(
        """async () => {
            const { difference } = await import("/static/diff.js");
            return [difference("the cat sat", "the dog sat down"), difference("不对，3", "是的，3"),
                    difference("", "new"), difference("a ".repeat(3000), "b ".repeat(3000)).length];
        }"""
    )
    same, gone, new = "same", "gone", "new"
    assert [(p["kind"], p["text"]) for p in parts[0]] == [
        (same, "the "), (gone, "cat"), (new, "dog"), (same, " sat"), (new, " down")
    ]  # fmt: skip
    assert [(p["kind"], p["text"]) for p in parts[1]] == [
        (gone, "不对"),
        (new, "是的"),
        (same, "，3"),
    ]
    assert parts[2] == [{"kind": new, "text": "new"}]
    assert parts[3] <= 6000, "too long to compare word by word, and shown all the same"


@pytest.mark.long
def test_one_prompt_is_followed_over_the_iterations(page, address, rows):
    page.goto(f"{address}/{AT}/row/{rows[0]['row']}")
    page.get_by_role("link", name="This prompt over the iterations").click()
    page.locator(".answer").first.wait_for()
    shown = page.locator(".answer .said").all_inner_texts()
    assert rows[0]["response"] in shown
    assert rows[0]["prompt"] in page.locator(".texts").inner_text()


def test_curves_are_smoothed_pinned_zoomed_and_put_on_a_log_axis(page, address):
    page.goto(f"{address}/#/run/live")
    page.locator(".chart .js-plotly-plot").nth(5).wait_for()
    page.get_by_label("Smoothing").fill("0.9")
    wait_until(page, "document.querySelector('.js-plotly-plot').data[0].y.length > 0")
    raw, calm = page.evaluate(
        "(() => { const [a, b] = document.querySelector('.js-plotly-plot').data; "
        "return [b.y, a.y] })()"
    )
    sums, mass, expected = 0.0, 0.0, []
    for value in raw:
        sums, mass = 0.9 * sums + 0.1 * value, 0.9 * mass + 0.1
        expected.append(sums / mass)
    assert calm == pytest.approx(expected)
    page.get_by_label("Log axis").check()
    wait_until(page, "document.querySelector('.js-plotly-plot').layout.yaxis.type === 'log'")

    entropy = page.locator(".chart", has_text="actor/entropy")
    entropy.hover()
    entropy.get_by_role("button", name="Pin").click()
    wait_until(
        page, "document.querySelector('.chart .metric').textContent.startsWith('actor/entropy')"
    )
    page.reload()
    page.locator(".chart .js-plotly-plot").first.wait_for()
    assert page.locator(".chart .metric").first.inner_text().startswith("actor/entropy")

    box = page.locator(".chart .nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + 60, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 160, box["y"] + 60, steps=4)
    page.mouse.up()
    ranges = (
        "[...document.querySelectorAll('.js-plotly-plot')].map(e => String(e.layout.xaxis.range))"
    )
    wait_until(page, f"new Set({ranges}).size === 1")
    assert (
        page.evaluate("document.querySelector('.js-plotly-plot').layout.xaxis.autorange") is False
    )
    page.get_by_role("button", name="Zoom out").click()
    wait_until(page, "document.querySelector('.js-plotly-plot').layout.xaxis.autorange === true")


@pytest.mark.long
def test_a_chart_is_saved_and_follows_the_width_of_its_card(page, address, run):
    page.goto(f"{address}/#/run/live")
    chart = page.locator(".chart").first
    chart.locator(".js-plotly-plot").wait_for()
    chart.hover()
    metrics = read_jsonl(run / "metrics.jsonl")
    heads, *cells = table_of(saved(page, chart.get_by_role("button", name="CSV").click))
    assert heads == ["run", "iteration", "score/mean"]
    assert [float(row[2]) for row in cells] == [line["score/mean"] for line in metrics]
    assert saved(page, chart.get_by_role("button", name="PNG").click)[:4] == b"\x89PNG"
    chart.get_by_role("button", name="Enlarge").click()
    wait_until(
        page,
        "(() => { const e = document.querySelector('.chart.large .js-plotly-plot');"
        " return Math.abs(e.querySelector('.main-svg').clientWidth - e.clientWidth) < 3 })()",
    )


def twins(folder, name: str, seed: int, score: float, lr: float = 1.0) -> None:
    (folder / name).mkdir()
    config = f"schema: 1\nseed: {seed}\ntrain: {{iterations: 9}}\nactor: {{lr: {lr}}}\n"
    (folder / name / "config.yaml").write_text(config)
    lines = [{"schema": 1, "iteration": i, "score/mean": score + i} for i in range(3)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / name / "metrics.jsonl").write_text(text)
    event = {"schema": 1, "iteration": 3, "kind": "failed", "message": f"ValueError: {name}"}
    (folder / name / "events.jsonl").write_text(json.dumps(event) + "\n")


@pytest.fixture
def seeds(browser, tmp_path, served_folder):
    for name, seed, score in (("a-0", 0, 1.0), ("a-1", 1, 3.0)):
        twins(tmp_path, name, seed, score)
    twins(tmp_path, "b", 0, 7.0, lr=2.0)
    with served_folder(tmp_path) as address:
        yield address


@pytest.fixture
def served_folder():
    from tests.browser.conftest import served

    return served


def test_the_table_of_runs_folds_seeds_sorts_filters_and_says_why_a_run_ended(page, seeds):
    page.goto(f"{seeds}/#/table")
    page.locator(".run-table tbody tr").first.wait_for()
    assert page.locator(".run-table tbody tr").count() == 2
    folded = page.locator(".folded").inner_text()
    assert "2 seeds" in folded
    assert "4 (3 – 5)" in folded, "the mean of the last scores, lowest and highest"
    page.get_by_role("button", name="2 seeds").click()
    assert page.locator(".seed-row").count() == 2
    assert "ValueError: a-1" in page.locator(".seed-row").last.inner_text()
    page.get_by_role("button", name="score/mean").click()
    assert page.locator(".run-table tbody tr").first.inner_text().strip().startswith("b")
    page.get_by_label("Find a run").fill("a-1")
    wait_until(page, "document.querySelectorAll('.run-table tbody tr').length === 1")
    page.get_by_label("Find a run").fill("")
    page.get_by_label("Fold seeds").uncheck()
    wait_until(page, "document.querySelectorAll('.run-table tbody tr').length === 3")

    page.get_by_label("Choose a-0").check()
    page.get_by_label("Choose b").check()
    page.get_by_role("link", name="Compare their configs").click()
    page.get_by_text("1 fields differ.").wait_for()
    assert "actor.lr" in page.locator("main").inner_text()


@pytest.mark.long
def test_folded_seeds_are_one_curve_with_a_band(page, seeds):
    page.goto(f"{seeds}/#/?runs=a-0/a-1/b&seeds=folded")
    page.locator(".chart .js-plotly-plot").first.wait_for()
    wait_until(page, "document.querySelector('.js-plotly-plot').data.length >= 6")
    data = page.evaluate(
        "document.querySelector('.js-plotly-plot').data"
        ".filter(d => d.mode.startsWith('lines')).map(d => d.y)"
    )
    curves = sorted(map(tuple, data))
    assert curves == sorted([(2.0, 3.0, 4.0), (1.0, 2.0, 3.0), (3.0, 4.0, 5.0), (7.0, 8.0, 9.0)])


def test_runs_of_different_tasks_are_compared_with_a_warning(page, tmp_path, served_folder):
    for name, data in (("x", "one.jsonl"), ("y", "two.jsonl")):
        twins(tmp_path, name, 0, 1.0)
        with (tmp_path / name / "config.yaml").open("a") as file:
            file.write(f"data: {{train: {data}}}\n")
    with served_folder(tmp_path) as address:
        page.goto(f"{address}/#/diff/x/y")
        page.get_by_text("their scores measure different things").wait_for()
        page.goto(f"{address}/#/run/x/heldout")
        page.get_by_text("kept no held-out responses").wait_for()


@pytest.mark.long
def test_a_run_that_is_not_whole_says_what_is_missing_and_shows_the_rest(
    page, tmp_path, served_folder
):
    """One iteration, of another schema, a damaged line, no rows, no evaluations, no events."""
    run = tmp_path / "old"
    run.mkdir()
    (run / "config.yaml").write_text("schema: 0\ntrain: {iterations: 9}\n")
    (run / "metrics.jsonl").write_text('{"schema": 0, "iteration": 0, "score/mean": 0.25}\n{bad\n')
    with served_folder(tmp_path) as address:
        page.goto(f"{address}/#/run/old")
        page.locator(".chart .js-plotly-plot").first.wait_for()
        assert page.evaluate("document.querySelector('.js-plotly-plot').data[0].y[0]") == 0.25
        banner = page.locator("#banner").inner_text()
        assert "schema 0" in banner
        assert "line 2" in banner
        page.get_by_text("A run is judged once it has 5 iterations.").wait_for()
        for place, said in (
            ("iteration/last", "This run has written no rows yet."),
            ("heldout", "no held-out responses"),
            ("events", "Nothing unusual happened."),
        ):
            page.goto(f"{address}/#/run/old/{place}")
            page.get_by_text(said).first.wait_for()


@pytest.mark.long
def test_the_doctor_speaks_on_the_page_of_a_run(page, tmp_path, served_folder):
    twins(tmp_path, "ill", 0, 1.0)
    numbers = {"response/eos_rate": 0.1, "response/length_mean": 9.0}
    lines = [{"schema": 1, "iteration": i, "score/mean": 0.5, **numbers} for i in range(8)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "ill" / "metrics.jsonl").write_text(text)
    with served_folder(tmp_path) as address:
        page.goto(f"{address}/#/run/ill")
        notice = page.locator(".notice", has_text="cut off at the limit")
        notice.wait_for()
        assert page.locator(".notice").count() == 2, "it failed, and responses are cut off"
        assert not notice.locator("li").first.is_visible()
        notice.locator("summary").click()
        shown = notice.inner_text()
        assert "response/eos_rate: 0.1000 (iteration 0) → 0.1000 (iteration 7)" in shown
        assert "rollout.max_response_tokens" in shown
        failed = page.locator(".notice", has_text="The run ended before its time")
        failed.locator("summary").click()
        assert "ValueError: ill" in failed.inner_text()
        page.get_by_role("button", name="中文").click()
        page.locator(".notice", has_text="很多回答没写完就被截断").wait_for()


@pytest.mark.long
def test_every_place_is_reached_by_single_keys(page, address):
    page.goto(address)
    page.locator(".run a").first.wait_for()
    page.keyboard.press("?")
    page.locator("dialog.help").wait_for()
    assert "table of runs" in page.locator("dialog.help").inner_text().lower()
    page.keyboard.press("Escape")
    page.keyboard.press("t")
    page.locator(".run-table").wait_for()
    page.goto(f"{address}/{AT}")
    page.locator(".rows tbody tr").first.wait_for()
    page.keyboard.press("]")
    page.locator("h1", has_text=f"Iteration {ITERATION + 1}").wait_for()
    page.locator(".rows tbody tr").first.wait_for()
    page.wait_for_timeout(200)
    page.keyboard.press("j")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.locator("h1", has_text="Row 1").wait_for()
    page.locator(".chip").first.wait_for()
    page.wait_for_timeout(200)
    page.keyboard.press("j")
    page.locator("h1", has_text="Row 2").wait_for()
    page.locator(".chip").first.wait_for()
    page.wait_for_timeout(200)
    page.keyboard.press("u")
    page.locator(".rows tbody tr").first.wait_for()
    page.wait_for_timeout(200)
    page.keyboard.press("/")
    page.keyboard.type("nothing like it j")
    page.get_by_text("No row matches.").wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("h")
    page.locator("h1", has_text="Held-out responses").wait_for()


def test_a_spreadsheet_sees_no_formula(page, address):
    page.goto(address)
    text = page.evaluate(
        """async () => (await import("/static/download.js")).csvText(
            [["=1+1", "@x", -2, null, 'a"b,c', {k: 1}]])"""
    )
    assert table_of(text.encode()) == [["'=1+1", "'@x", "-2", "", 'a"b,c', '{"k":1}']]
