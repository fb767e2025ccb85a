"""What the faults patch by name is there: after a rename they would strike nothing."""

import importlib
import re
from operator import attrgetter
from pathlib import Path

from helpers import table

DOTTED = re.compile(r"\"(tether\.[\w.]+):([\w.]+)\"")
NAMED = [
    (file.name, module, name)
    for file in sorted(Path(__file__).parent.glob("*.py"))
    for module, name in DOTTED.findall(file.read_text(encoding="utf-8"))
]


def test_faults_name_functions():
    assert len(NAMED) > 5


@table(("file", "module", "name"), NAMED)
def test_every_patched_function_exists(file, module, name):
    assert callable(attrgetter(name)(importlib.import_module(module)))
