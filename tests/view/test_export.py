"""The page as a folder: everything in it, and nothing that text in a run could break."""

import json
import re
import shutil
import subprocess

import pytest
from helpers import table

from tether.errors import UserError
from tether.view.export import as_script, bundle, export_page, exported_index, file_name
from tether.view.run_reader import Folder
from view.conftest import MadeRun, client_of

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "\u2028\u2029",
    '"; alert(1); "',
    "\\",
    "`${alert(1)}`",
    "\ud83d",
    "\x00\x1b[31m",
    "]]>",
    "日本語 <b>",
]


def body_of(script: str) -> tuple[str, object]:
    """(key, body) of one assignment, read as JSON after undoing nothing."""
    matched = re.fullmatch(r'tether_export\[("(?:[^"\\]|\\.)*")\] = (.*);\n', script, re.DOTALL)
    return json.loads(matched[1]), json.loads(matched[2])


@table("text", HOSTILE)
def test_no_text_breaks_out_of_a_script(text):
    script = as_script(f"/api/runs/{text}", {"prompt": text, text: [text]})
    assert script.isascii()
    assert "<" not in script
    assert script.count("\n") == 1
    assert body_of(script) == (f"/api/runs/{text}", {"prompt": text, text: [text]})


def test_an_export_holds_every_answer_that_the_page_asks_for(runs, client, tmp_path):
    folder = tmp_path / "one"
    shutil.copytree(runs / "gae", folder / "gae")
    assert export_page(Folder(folder), tmp_path / "out", demo=False) == 1
    written = dict(body_of(f.read_text()) for f in (tmp_path / "out" / "data").iterdir())
    rows = client.get("/api/runs/gae/rollouts/1").json()["rows"]
    paths = ["/api/runs", "/api/runs/gae", "/api/runs/gae/evals", "/api/runs/gae/events"]
    paths.append("/api/runs/gae/notices")
    paths += [f"/api/runs/gae/rollouts/1/{row['row']}" for row in rows]
    paths += ["/api/runs/gae/rollouts/1", "/api/runs/gae/rollouts/0"]
    fresh = client_of(folder)
    for path in paths:
        assert written[path] == fresh.get(path).json()
    names = written["/api/runs/gae"]["names"]
    series = fresh.get(f"/api/runs/gae/series?names={','.join(names)}").json()
    assert written["/api/runs/gae/series"] == series
    assert all(len(values) == 2 for values in series["values"].values())


def test_the_folder_is_whole_and_asks_nobody_else(runs, tmp_path):
    shutil.copytree(runs / "grpo", tmp_path / "runs" / "grpo")
    export_page(Folder(tmp_path / "runs"), tmp_path / "out", demo=False)
    html = (tmp_path / "out" / "index.html").read_text()
    assert '<body data-export="true">' in html
    assert "script-src 'self'" in html
    assert 'type="module"' not in html
    for source in re.findall(r'(?:src|href)="([^"#:]+)"', html):
        assert (tmp_path / "out" / source).is_file(), source
    assert not re.search(r'(?:src|href)="(?:https?:)?//', html)


def test_a_run_may_have_any_name(tmp_path):
    name = "a b#%+=?ü"
    MadeRun(tmp_path / "runs" / name)
    export_page(Folder(tmp_path / "runs"), tmp_path / "out", demo=False)
    key = "/api/runs/a%20b%23%25%2B%3D%3F%C3%BC"  # as encodeURIComponent writes it
    script = (tmp_path / "out" / "data" / "runs+a=20b=23=25=2B=3D=3F=C3=BC.js").read_text()
    assert body_of(script)[0] == key
    assert body_of(script)[1]["id"] == name


def test_different_paths_have_different_files():
    paths = ["/api/runs", "/api/runs/a", "/api/runs/a%2Bb", "/api/runs/a/b", "/api/runs/a%3D"]
    assert len({file_name(path) for path in paths}) == len(paths)


def test_a_folder_that_holds_something_is_left_alone(made, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").touch()
    with pytest.raises(UserError, match="--export"):
        export_page(Folder(made.directory), tmp_path / "out", demo=False)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine.txt"]


MODULES = {
    "main.js": 'import { double, COUNT as many } from "./maths.js";\n'
    'import {\n  say,\n} from "./say.js";\nsay(double(many));\n',
    "maths.js": "const hidden = 2;\nexport const COUNT = 21;\n"
    "export function double(x) {\n  return hidden * x;\n}\n",
    "say.js": 'import { double } from "./maths.js";\nconst hidden = double(1);\n'
    "export function say(x) {\n  console.log(x, hidden);\n}\n",
}


@pytest.mark.skipif(shutil.which("node") is None, reason="node runs the bundled script")
def test_bundled_modules_do_what_they_did(tmp_path):
    (tmp_path / "app.js").write_text(bundle(MODULES, "main.js"))
    done = subprocess.run(["node", tmp_path / "app.js"], capture_output=True, text=True, check=True)
    assert done.stdout == "42 2\n"


def test_modules_come_after_what_they_import():
    script = bundle(MODULES, "main.js")
    places = [script.index(f'modules["{n}"] = ') for n in ("maths.js", "say.js", "main.js")]
    assert places == sorted(places)
    assert 'const { double, COUNT: many } = modules["maths.js"];' in script
    assert script.count('modules["maths.js"] = ') == 1


@table(
    "line",
    ['import x from "./maths.js";', 'import * as m from "./maths.js";', "export { a };",
     "export default 1;", "export let x = 1;"],
)  # fmt: skip
def test_a_form_that_is_not_understood_is_refused(line):
    with pytest.raises(ValueError, match="not understood"):
        bundle({**MODULES, "main.js": line}, "main.js")


def test_modules_in_a_circle_are_refused():
    circle = {"a.js": 'import { b } from "./b.js";', "b.js": 'import { a } from "./a.js";'}
    with pytest.raises(ValueError, match=r"a\.js -> b\.js -> a\.js"):
        bundle(circle, "a.js")


def test_an_index_without_the_known_places_is_refused():
    with pytest.raises(ValueError, match=r"index\.html"):
        exported_index("<html></html>")
