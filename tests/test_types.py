"""pyright (standard) finds nothing to say about the source, as `make type`."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MATHS = ["src/tether/types.py", "src/tether/algo"]

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="pyright needs node")


def complaints(*paths: str | Path) -> list[str]:
    """Return pyright's errors about these files, or about what pyproject.toml includes."""
    pyright = Path(sys.executable).with_name("pyright")
    command = [pyright, "--pythonpath", sys.executable, "--outputjson", *paths]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = json.loads(ended.stdout)
    assert found["summary"]["filesAnalyzed"] > 0, ended.stdout
    return [
        f"{error['file']}:{error['range']['start']['line'] + 1}: {error['message']}"
        for error in found["generalDiagnostics"]
    ]


def test_the_types_of_the_maths_are_right_and_a_wrong_one_is_found(tmp_path):
    """Both in one call: most of pyright's time goes into reading torch."""
    file = tmp_path / "wrong.py"
    file.write_text("from tether.algo.kl import k1\n\nk1('a', 'b', 'c')\n")
    found = complaints(*MATHS, file)
    assert any("cannot be assigned" in text for text in found)
    assert [text for text in found if not text.startswith(str(file))] == []


@pytest.mark.long  # a minute and a half of processor time
def test_the_types_of_the_whole_source_are_right():
    include = re.search(r"\[tool\.pyright\]\ninclude = (.*)", (ROOT / "pyproject.toml").read_text())
    assert include is not None
    assert json.loads(include[1]) == ["src/tether"]
    assert complaints() == []
