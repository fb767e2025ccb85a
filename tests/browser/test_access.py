"""For everyone: by keyboard alone, on a phone, in Chinese, in the dark."""

import pytest

from tests.browser.conftest import ITERATIONS, wait_until

VIEWS = [
    "#/",
    "#/run/live",
    "#/run/live/iteration/3",
    "#/run/live/iteration/3?show=groups",
    "#/run/live/iteration/3?show=pictures",
    "#/run/live/iteration/3?show=batch",
    "#/run/live/iteration/3/row/1",
    "#/run/live/timeline/3",
    "#/run/live/heldout",
    "#/run/live/heldout/0",
    "#/table",
    "#/diff/live/tools",
    "#/run/live/events",
    "#/run/live/config",
]


def tab_to(page, matches: str) -> None:
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate(f"document.activeElement.matches({matches!r})"):
            return
    raise AssertionError(f"the tab key never reached {matches}")


def test_a_row_is_reached_and_coloured_without_the_mouse(page, run, address):
    page.goto(address)
    page.wait_for_selector(".run a")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    tab_to(page, ".run a")
    page.keyboard.press("Enter")
    page.wait_for_selector(".tabs")
    tab_to(page, ".tabs a[href*=iteration]")
    page.keyboard.press("Enter")
    page.wait_for_selector(".rows tbody a")
    tab_to(page, ".rows tbody a")
    page.keyboard.press("Enter")
    page.wait_for_selector(".chip")
    tab_to(page, ".bar select")
    page.keyboard.type("kl")
    assert page.locator(".bar .legend strong").inner_text() == "kl"

    tab_to(page, ".chip")
    page.keyboard.press("End")
    last = page.locator(".chip").count() - 1
    assert page.locator(".detail h3").inner_text().startswith(f"token {last} ")
    page.keyboard.press("ArrowLeft")
    assert page.locator(".detail h3").inner_text().startswith(f"token {last - 1} ")


def test_rows_are_sorted_and_filtered(page, run, address):
    page.goto(f"{address}/#/run/live/iteration/3")
    page.wait_for_selector(".rows tbody tr")

    def column(number: int) -> list[str]:
        return page.locator(f".rows tbody td:nth-child({number})").evaluate_all(
            "es => es.map(e => e.title || e.textContent)"
        )

    page.get_by_role("button", name="KL").click()
    falling = [float(x) for x in column(6)]
    assert falling == sorted(falling, reverse=True)
    page.get_by_role("button", name="KL").click()
    rising = [float(x) for x in column(6)]
    assert rising == sorted(falling)

    wanted = column(2)[0]
    page.get_by_label("Text contains").fill(wanted)
    wait_until(page, "document.querySelectorAll('.rows tbody tr').length < 16")
    assert set(column(2)) == {wanted}
    page.get_by_label("Text contains").fill("no such text anywhere")
    page.get_by_text("No row matches.").wait_for()
    page.get_by_label("Text contains").fill("")
    page.get_by_label("Score from").fill("0.5")
    wait_until(page, "document.querySelectorAll('.rows tbody tr').length < 16")
    assert all(float(x) >= 0.5 for x in column(5))


@pytest.mark.long
def test_the_iteration_picker_goes_everywhere(page, run, address):
    page.goto(f"{address}/#/run/live/iteration/last")
    heading = page.locator("h1")
    heading.get_by_text(f"Iteration {ITERATIONS - 1}").wait_for()
    page.get_by_role("button", name="Previous").click()
    heading.get_by_text(f"Iteration {ITERATIONS - 2}").wait_for()
    page.locator(".bar input[type=number]").first.fill("4")
    page.keyboard.press("Enter")
    heading.get_by_text("Iteration 4").wait_for()


def walk(page, address):
    """Every view in turn, loaded once."""
    page.goto(address)
    for view in VIEWS:
        page.evaluate("place => { location.hash = place }", view)
        wait_until(page, f"location.hash === {view!r}")
        page.wait_for_timeout(500)
        page.locator("main h1").first.wait_for()
        yield view


@pytest.mark.long
def test_no_view_is_wider_than_a_phone(browser, run, address):
    context = browser.new_context(viewport={"width": 360, "height": 740}, locale="en-GB")
    page = context.new_page()
    for view in walk(page, address):
        assert page.evaluate("document.scrollingElement.scrollWidth") <= 360, view
    context.close()


def test_the_toggle_turns_every_heading_to_chinese_and_is_remembered(page, run, address):
    def headings() -> list[str]:
        return page.locator("main h1, main h2, .tabs a").all_inner_texts()

    english = [headings() for _ in walk(page, address)]
    page.get_by_role("button", name="中文").click()
    chinese = [headings() for _ in walk(page, address)]  # in a page that was loaded again
    for before, after in zip(english, chinese, strict=True):
        assert len(before) == len(after)
        assert {text for text in before if text in after} <= {"live", "live · tools"}, (
            "a run's name stays"
        )


@pytest.mark.long
def test_dark_follows_the_system_and_the_button(browser, run, address):
    def background(page) -> str:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    context = browser.new_context(color_scheme="dark", locale="en-GB")
    page = context.new_page()
    page.goto(address)
    dark = background(page)
    page.get_by_role("button", name="Light").click()
    light = background(page)
    assert sum(map(int, light[4:-1].split(","))) > 600 > 150 > sum(map(int, dark[4:-1].split(",")))
    page.reload()
    assert background(page) == light, "remembered"
    context.close()
