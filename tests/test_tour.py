"""examples/tour.ipynb runs from top to bottom, each cell's last value shows itself, and git holds
no outputs."""

import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOUR = ROOT / "examples" / "tour.ipynb"
FULL = "ITERATIONS, PROMPTS, EVAL_PROMPTS = 5, 64, 100"
QUICK = "ITERATIONS, PROMPTS, EVAL_PROMPTS = 2, 4, 4"
MINUTES = 4


def cells(kind: str = "code") -> list[str]:
    notebook = json.loads(TOUR.read_text(encoding="utf-8"))
    return ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == kind]


def shown(value: object) -> str | None:
    """What a notebook would show of a cell's last value."""
    if value is None:
        return None
    as_html = getattr(value, "_repr_html_", None)
    text = None if as_html is None else as_html()
    return repr(value) if text is None else text  # a figure of matplotlib has none of the kind


def execute(sources: list[str]) -> list[str | None]:
    """Run cells in one namespace, as a kernel does, and return what each one shows."""
    names: dict[str, object] = {}
    found = []
    for number, source in enumerate(sources):
        tree, last = ast.parse(source), None
        if isinstance(tree.body[-1], ast.Expr):
            last = ast.Expression(tree.body.pop().value)
        exec(compile(tree, f"cell {number}", "exec"), names)
        value = eval(compile(last, f"cell {number}", "eval"), names) if last else None
        found.append(shown(value))
    return found


def test_git_holds_no_outputs_and_every_cell_is_python():
    notebook = json.loads(TOUR.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None
    assert any(FULL in source for source in cells())
    assert len(cells()) >= 10
    for source in cells():
        ast.parse(source)


def test_the_tour_runs_in_its_quick_form(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # drawn in tests/test_shown.py
    small = [
        source.replace(FULL, QUICK).replace(
            '"run.overwrite": True', '"threads": 1, "run.overwrite": True'
        )
        for source in cells()
    ]
    found = execute(small)
    text = "".join(filter(None, found))
    assert text.count("draws with matplotlib, which is not installed") == 3
    for words in ("2 iterations", "advantages", "everything is in", "rgba(", "kl.in_reward.coef"):
        assert words in text, words
    assert "Iteration(1: 8 rows, score/mean" in capsys.readouterr().out
    assert (tmp_path / "out/tour/model/model.safetensors").is_file()


@pytest.mark.long
def test_the_tour_runs_as_it_stands(tmp_path):
    """In a process of its own, with pictures, in the time that the page promises."""
    program = tmp_path / "tour.py"
    program.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT / 'tests')!r})\n"
        "from test_tour import cells, execute\n"
        "found = execute(cells())\n"
        "drawn = [text for text in found if text and text.startswith('<Figure')]\n"
        "assert len(drawn) == 3, found\n"
    )
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=tmp_path,
        env={**os.environ, "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 60 * MINUTES
