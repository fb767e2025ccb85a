"""The built site: no warning, no broken link, no request elsewhere, and it opens from disk."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
LINK = re.compile(r'(?:href|src)="([^"]+)"')


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    if importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: pip install '.[site]'")
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not re.search(r"WARNING +-", done.stderr), done.stderr
    return folder


@pytest.mark.long
def test_every_link_of_the_built_site_leads_to_a_file(site):
    broken = []
    for page in site.rglob("*.html"):
        if site / "demo" in page.parents or page.name == "404.html":
            continue
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            if re.match(r"(?:https?:|mailto:|data:|#|javascript:)", target):
                continue
            path = (page.parent / unquote(target.partition("#")[0].partition("?")[0])).resolve()
            if not (path.is_file() or (path / "index.html").is_file()):
                broken.append((page.name, target))
    assert broken == []


@pytest.mark.long
def test_the_site_fetches_nothing_from_another_host(site):
    load = re.compile(r'<(?:script|link|img|iframe)\b[^>]*(?:src|href)="(?:https?:)?//[^"]+"')
    for page in site.rglob("*.html"):
        found = [
            tag for tag in load.findall(page.read_text(encoding="utf-8")) if "canonical" not in tag
        ]
        assert found == [], page


@pytest.mark.long
def test_the_site_has_search_in_two_languages_the_reference_and_the_demo(site):
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert "advantage" in index
    assert json.dumps("优势")[1:-1] in index
    reference = (site / "reference" / "algo.html").read_text(encoding="utf-8")
    assert "estimate_advantages" in reference
    assert "tether.api.train" in (site / "reference" / "api.html").read_text(encoding="utf-8")
    assert (site / "demo" / "index.html").is_file()


@pytest.mark.long
def test_the_site_works_from_disk(site, browser):
    page = browser.new_page()
    page.set_default_timeout(60_000)
    page.goto((site / "demo.html").as_uri())
    frame = page.frame_locator("iframe[title]")
    frame.locator(".chart .js-plotly-plot").first.wait_for()
    page.goto((site / "index.html").as_uri())
    page.keyboard.press("/")  # opens the search
    page.locator("input[name=query]").press_sequentially("explained variance")
    page.locator(".md-search-result__link").first.wait_for()
    page.close()
