"""The exported folder, opened from disk, with no network at all."""

from pathlib import Path

from tether.view.export import export_page
from tether.view.run_reader import Folder


def test_the_export_opens_from_disk_and_shows_its_runs(page, run, tmp_path):
    export_page(Folder(run.parent), tmp_path / "out", demo=False)
    complaints, asked = [], []
    page.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto((tmp_path / "out" / "index.html").as_uri())
    page.get_by_text(run.name).first.wait_for()
    assert complaints == []
    outside = [url for url in asked if not url.startswith(Path(tmp_path).as_uri())]
    assert [url for url in outside if not url.startswith(("data:", "blob:"))] == []
