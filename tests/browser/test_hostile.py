"""FAULTS S1: hostile text in every place of the page, in a real browser. Nothing executes."""

import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.browser.conftest import ENVIRONMENT, WIDE, served
from tests.browser.hostile import make_runs, payloads

# The heat map is a picture that plotly draws from numbers.
LEFT_BEHIND = """[...document.querySelectorAll(
    '[data-pwned],img,iframe,object,embed,form,marquee,math,base,video,audio,template,image,' +
    'foreignObject,animate,link[href*=far],[onerror],[onload],[onclick],[onfocus],[onmouseover]'
)].filter(e => !(
    e.matches('.js-plotly-plot .heatmaplayer image') &&
    e.href.baseVal.startsWith('data:image/png;base64,')
)).map(e => e.outerHTML)"""
ODD_LINKS = """[...document.querySelectorAll('[href]')].map(e => e.getAttribute('href')).filter(
    href => !href.startsWith('#') && !['data:,', 'static/style.css', 'plotly.min.js'].includes(href)
)"""
SHOWN = "document.getElementById('main').textContent"


class Watch:
    """Everything that must not happen while hostile text is on the page."""

    def __init__(self, page, home: str) -> None:
        self.page, self.home = page, home
        self.dialogs, self.strangers, self.complaints, self.errors = [], [], [], []
        page.on("dialog", self.dialog)
        page.on("request", self.request)
        page.on("console", self.console)
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def dialog(self, dialog) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()

    def request(self, request) -> None:
        if not request.url.startswith((self.home, "data:", "blob:")):
            self.strangers.append(request.url)

    def console(self, message) -> None:
        """A blocked script, or a fault of the page's own; an address without a run is neither."""
        expected = "Failed to load resource" in message.text
        if message.type in ("error", "warning") and not expected:
            self.complaints.append(message.text)

    def check(self, place: str) -> None:
        assert self.page.evaluate("window.pwned") is None, place
        assert self.page.evaluate(LEFT_BEHIND) == [], place
        assert self.page.evaluate(ODD_LINKS) == [], place
        assert len(self.page.context.pages) == 1, place
        happened = [self.dialogs, self.strangers, self.complaints, self.errors]
        assert happened == [[], [], [], []], place


def visit(page, watch: Watch, runs: list[str], exported: bool) -> str:
    """Every view and every control that puts text on the page; all the text that was shown."""
    seen = []

    def go(place: str, awaited: str) -> None:
        page.evaluate("place => { location.hash = place }", place)
        page.locator(awaited).first.wait_for()
        page.wait_for_timeout(150)
        note(place)

    def note(place: str) -> None:
        watch.check(place)
        seen.append(page.evaluate(SHOWN))

    run = f"#/run/{quote(runs[0], safe='')}"
    page.goto(watch.home + ("/index.html" if exported else "/"))
    for box in page.locator(".run input").all():
        box.check()
    page.locator(".chart .js-plotly-plot").first.wait_for()
    note("the list of runs")

    go(run, ".chart .js-plotly-plot")
    page.locator(".notice").first.wait_for()  # the message of the event that ended the run
    for details in page.locator("details").all():
        details.evaluate("e => { e.open = true }")
    for name in payloads()[5:11]:
        page.locator(".more select").evaluate(
            "(e, name) => { e.value = name; e.dispatchEvent(new Event('change')) }", name
        )
        page.wait_for_timeout(150)
    page.locator(".chart .plot").first.hover()
    note("curves of hostile names")

    go(f"{run}/events", "tbody tr")
    page.get_by_role("button", name="Older").click()
    page.get_by_role("button", name="Newer").wait_for()
    note("older events")
    go(f"{run}/config", "pre")

    go("#/table", ".run-table tbody tr")
    page.get_by_label("Fold seeds").uncheck()
    page.wait_for_timeout(200)
    note("the table of runs")
    go(f"#/diff/{quote(runs[0], safe='')}/{quote(runs[1], safe='')}", "tbody tr")
    go(f"{run}/heldout", ".rows tbody tr")
    go(f"{run}/heldout?decoding=sampled&kind=better", ".rows tbody tr")
    for held in (9, 40):
        go(f"{run}/heldout/{held}", ".answer")
    go(f"{run}/prompt/1?file={quote(payloads()[3], safe='')}", ".history")
    go(f"{run}/iteration/2?show=groups", ".group")
    go(f"{run}/iteration/3?show=pictures", ".chart .js-plotly-plot")
    if not exported:
        go(f"{run}/iteration/3?show=batch", ".totals td")

    go(f"{run}/iteration/2", ".rows tbody tr")
    page.locator(".chooser summary").click()
    for box in page.locator(".chooser input:not(:checked)").all():
        box.check()
    page.locator(".chooser summary").click()
    page.get_by_label("Add a filter").select_option("columns.further")
    page.get_by_label("further contains").fill("<")
    page.wait_for_timeout(300)
    note("every column, filtered")
    page.get_by_label("further contains").fill("")
    for button in page.locator(".rows thead button").all():
        button.click()
    page.get_by_role("button", name="Next").last.click()
    note("more rows")
    page.get_by_label("Text contains").fill("<script>")
    page.wait_for_timeout(300)
    note("filtered rows")

    for row in (0, 1):
        go(f"{run}/iteration/3/row/{row}", ".chip")
        for column in ("kl", "ratio", "clip"):
            page.locator(".bar select").select_option(column)
        for at in range(0, 400, 80):
            page.locator(".chip").nth(at).hover()
        page.locator("details").last.evaluate("e => { e.open = true }")
        if not exported:
            page.locator(".whatif td.after").first.wait_for()
        note(f"row {row}")

    for text in payloads()[5:80:25]:
        go(f"#/run/{quote(text, safe='')}", "main a[href='#/']")
        go(f"{run}/iteration/2/row/1?colour={quote(text)}&kl.in_reward.coef={quote(text)}", ".chip")
    page.get_by_role("button", name="中文").click()
    page.wait_for_timeout(500)
    note("in Chinese")
    return "\n".join(seen)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("hostile")
    return folder, make_runs(folder)


@pytest.fixture
def watched_page(browser):
    context = browser.new_context(viewport=WIDE, locale="en-GB")
    page = context.new_page()
    page.set_default_timeout(180_000)
    yield page
    context.close()


def test_there_are_four_hundred_different_payloads():
    assert len(set(payloads())) == 400


@pytest.mark.long
def test_hostile_text_stays_text_on_the_page(watched_page, hostile):
    folder, runs = hostile
    with served(folder) as address:
        shown = visit(watched_page, Watch(watched_page, address), runs, exported=False)
    assert_all_shown(shown)


@pytest.mark.long
def test_hostile_text_stays_text_in_an_exported_folder(watched_page, hostile, tmp_path):
    folder, runs = hostile
    target = tmp_path / "exported"
    command = [sys.executable, "-m", "tether", "view", str(folder), "--export", str(target)]
    subprocess.run(command, check=True, env=ENVIRONMENT, capture_output=True)
    shown = visit(watched_page, Watch(watched_page, target.as_uri()), runs, exported=True)
    assert_all_shown(shown)
    assert "needs “tether view”" in shown


def assert_all_shown(shown: str) -> None:
    """The payloads did reach the page: a page that shows nothing is safe, and no use."""
    plain = [
        text for text in payloads() if text.isprintable() and text.isascii() and len(text) < 150
    ]
    assert len(plain) > 200
    assert [text for text in plain if text not in shown] == []
    assert "⟨U+202E⟩" in shown
    assert "␛[31m" in shown
    assert "␀" in shown
