"""A row's tokens: their colours, their words, and what other settings make of them."""

import json
import math

import numpy as np
import pytest

from tests.helpers import read_jsonl

ITERATION = 5


@pytest.fixture
def row(page, run, address):
    """The page at a row of several tokens, and that row as the run's file has it."""
    rows = read_jsonl(run / "rollouts" / f"{ITERATION:06d}.jsonl")
    row = max(rows, key=lambda row: len(row["response_ids"]))
    page.goto(f"{address}/#/run/live/iteration/{ITERATION}/row/{row['row']}")
    page.wait_for_selector(".chip")
    page.wait_for_selector("td.after")
    return row


def colours(page) -> list[str]:
    page.wait_for_timeout(250)  # the colours fade over
    return page.eval_on_selector_all(
        ".chip", "es => es.map(e => getComputedStyle(e).backgroundColor)"
    )


def test_chips_take_the_colours_of_the_chosen_column(page, row):
    seen = set()
    for column in ("kl", "values", "ratio"):
        page.get_by_label("Colour by").select_option(column)
        seen.add(tuple(colours(page)))
        assert page.locator(".bar .legend strong").inner_text() == column
        centre = 1 if column == "ratio" else 0
        numbers = row[column] if column != "ratio" else ratios(row)
        reach = max(abs(x - centre) for x in numbers)
        ends = page.locator(".bar .legend .num").evaluate_all("es => es.map(e => e.title)")
        assert [float(x) for x in ends] == pytest.approx([centre - reach, centre + reach], rel=1e-5)
        sides = page.eval_on_selector_all(
            ".chip", "es => es.map(e => e.classList.contains('below'))"
        )
        assert sides == [x < centre for x in numbers]
    assert len(seen) == 3


def ratios(row: dict) -> list[float]:
    pairs = zip(row["new_log_probs"], row["old_log_probs"], strict=True)
    return [float(np.exp(np.float32(new) - np.float32(old))) for new, old in pairs]


@pytest.mark.long
def test_clip_states_have_their_own_legend(page, row):
    page.get_by_label("Colour by").select_option("clip")
    assert "clipped: fallen enough" in page.locator(".bar .legend").inner_text()


def test_a_token_is_explained_by_its_own_numbers(page, row):
    """delta and advantage of the token before the last, worked out here by hand."""
    at = len(row["response_ids"]) - 2
    page.locator(".chip").nth(at).focus()
    said = page.locator(".detail").inner_text().replace("\u2212", "-")
    r, value, after = (
        row["token_level_rewards"][at],
        row["values"][at],
        row["values"][at + 1],
    )
    delta = r + 1.0 * after - value
    advantage = delta + 0.95 * row["advantages"][at + 1]
    surprise = next(line for line in said.splitlines() if line.startswith("δ = "))
    assert float(surprise.rpartition("= ")[2]) == pytest.approx(delta, rel=2e-3, abs=1e-6)
    total = next(line for line in said.splitlines() if line.startswith("Â = "))
    assert float(total.rpartition("= ")[2]) == pytest.approx(advantage, rel=2e-3, abs=1e-6)
    assert f"{100 * math.exp(row['old_log_probs'][at]):.3g}%"[:4] in said


def test_moving_beta_moves_the_numbers_and_reset_brings_them_back(page, row):
    def after(column: int) -> list[float]:
        cells = page.locator(f".whatif .numbers tbody tr td:nth-child({column})")
        return [float(x) for x in cells.evaluate_all("es => es.map(e => e.title)")]

    rewards_before, rewards_after = 4, 5  # token, kl twice, token_level_rewards twice
    assert after(rewards_after) == after(rewards_before)
    page.locator(".whatif").get_by_label("kl.in_reward.coef").first.fill("0.5")
    page.wait_for_selector("td.differs")
    moved = [
        r - (0.5 - row["beta"]) * kl
        for r, kl in zip(row["token_level_rewards"], row["kl"], strict=True)
    ]
    assert after(rewards_after) == pytest.approx(moved, abs=1e-6)
    assert "kl.in_reward.coef=0.5" in page.url, "the address shows it again"

    page.get_by_role("button", name="Back to the run's settings").click()
    page.get_by_text("after equals before").wait_for()
    assert page.locator("td.differs").count() == 0
    assert after(rewards_after) == pytest.approx(row["token_level_rewards"], rel=1e-6)
    assert "kl.in_reward" not in page.url


def test_moving_beta_moves_the_colours_of_the_tokens(page, row):
    """Colours follow the rewards under the new beta, on a scale that holds old and new."""
    page.get_by_label("Colour by").select_option("token_level_rewards")
    before = page.eval_on_selector_all(
        ".chip", "es => es.map(e => e.style.getPropertyValue('--share'))"
    )
    page.locator(".whatif").get_by_label("kl.in_reward.coef").first.fill("5")
    page.locator(".bar .legend + p + p.warn").wait_for()
    pairs = zip(row["token_level_rewards"], row["kl"], strict=True)
    moved = [r - (5 - row["beta"]) * kl for r, kl in pairs]
    reach = max(abs(x) for x in [*moved, *row["token_level_rewards"]])
    shares = page.eval_on_selector_all(
        ".chip", "es => es.map(e => parseFloat(e.style.getPropertyValue('--share')))"
    )
    assert shares == pytest.approx([100 * abs(x) / reach for x in moved], abs=0.1)
    assert before != shares


@pytest.mark.long
def test_the_beta_slider_is_a_slider(page, row):
    slider = page.locator(".whatif input[type=range]").first
    slider.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("td.differs")


def test_a_setting_that_cannot_be_is_answered_in_words(page, row):
    page.locator(".whatif").get_by_label("advantage.gamma").first.fill("7")
    page.locator(".whatif").get_by_text("gamma is '7'").wait_for()


def test_what_if_at_own_settings_equals_the_file_bit_for_bit(page, run, address):
    """As the page itself asks for it; the file's decimals read back to the same float32."""
    page.goto(address)
    columns = ("kl", "token_level_rewards", "advantages", "returns", "policy_advantages")
    rows = [row for path in sorted((run / "rollouts").glob("*.jsonl")) for row in read_jsonl(path)]
    rows = rows[:120]
    assert len(rows) >= 100
    paths = [f"/api/runs/live/rollouts/{row['iteration']}/{row['row']}/whatif" for row in rows]
    answers = page.evaluate(
        """async (paths) => {
            const { get } = await import("/static/api.js");
            const answers = [];
            for (const path of paths) answers.push(await get(path));
            return JSON.stringify(answers);
        }""",
        paths,
    )
    for row, answer in zip(rows, json.loads(answers), strict=True):
        assert answer["own"]
        for name in columns:
            logged = np.array(row[name], dtype=np.float32)
            computed = np.array(answer["after"][name], dtype=np.float32)
            assert logged.tobytes() == computed.tobytes(), (row["iteration"], row["row"], name)


def test_what_a_tool_wrote_is_hatched_and_called_so(page, run, address):
    page.goto(f"{address}/#/run/tools/iteration/0/row/0")
    page.wait_for_selector(".chip")
    hatched = page.eval_on_selector_all(
        ".chip", "es => es.map(e => e.classList.contains('hatched'))"
    )
    assert hatched == [True, False, False, True, False, False]
    painted = page.eval_on_selector_all(".chip", "es => es.map(e => e.style.length > 0)")
    assert painted == [not tool for tool in hatched], "no number of a tool's token is shown"
    page.locator(".chip").first.focus()
    assert "not written by the policy" in page.locator(".detail").inner_text()
    assert page.locator(".chip").nth(2).inner_text() == "↵"


@pytest.mark.long
def test_correction_weights_are_shown_and_multiply_the_objective(page, run, address):
    """In this row new and old log-probs are equal, so an objective is weight times advantage."""
    page.goto(f"{address}/#/run/tools/iteration/0/row/0")
    page.wait_for_selector("td.after")
    [row, _] = read_jsonl(run.parent / "tools" / "rollouts" / "000000.jsonl")
    assert "correction_weights" in page.locator(".bar select option").all_inner_texts()
    heads = page.locator(".whatif .numbers thead tr:first-child th").all_inner_texts()
    cells = page.locator(f".whatif .numbers tbody tr td:nth-child({2 * heads.index('objective')})")
    shown = [float(x) for x in cells.evaluate_all("es => es.map(e => e.title)")]
    pairs = zip(row["correction_weights"], row["policy_advantages"], strict=True)
    expected = [
        w * a if own else 0.0 for (w, a), own in zip(pairs, row["response_mask"], strict=True)
    ]
    assert shown == pytest.approx(expected, abs=1e-6)
    page.locator(".chip").nth(1).focus()
    assert "correction weight" in page.locator(".detail").inner_text()


@pytest.mark.long
def test_a_row_of_an_older_version_shows_what_it_has(page, run, address):
    page.goto(f"{address}/#/run/tools/iteration/0/row/1")
    page.wait_for_selector(".chip")
    assert page.locator(".chip").count() == 6
    columns = page.locator(".bar select option").all_inner_texts()
    assert "values" in columns
    assert "ref_log_probs" not in columns
