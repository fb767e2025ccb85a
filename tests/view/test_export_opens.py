"""The exported folder in a real browser, opened from disk, with no network at all."""

import shutil
from pathlib import Path

import pytest

from tether.view.export import export_page
from tether.view.source import Folder

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


def test_the_export_opens_from_disk_and_shows_its_runs(runs, tmp_path):
    from playwright.sync_api import sync_playwright

    shutil.copytree(runs / "gae", tmp_path / "runs" / "gae")
    export_page(Folder(tmp_path / "runs"), tmp_path / "out", demo=False)
    address = (tmp_path / "out" / "index.html").as_uri()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page()
        complaints, asked = [], []
        page.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(address)
        page.get_by_text("gae").first.wait_for(timeout=15_000)
        browser.close()
    assert complaints == []
    outside = [url for url in asked if not url.startswith(Path(tmp_path).as_uri())]
    assert [url for url in outside if not url.startswith(("data:", "blob:"))] == []
