"""Imports point one way, and nothing in the source runs code that came as data."""

import ast
from collections.abc import Iterator
from pathlib import Path

from helpers import table

import tether

SOURCE = Path(tether.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

# errors, types, support, config <- algo <- data, tasks <- models <- rewards <- rollout <- ppo
# <- planning <- train <- stages <- explain, api, view <- cli
TIERS = [
    {"types", "support", "config"},
    {"algo"},
    {"data", "tasks"},
    {"models"},
    {"rewards"},
    {"rollout"},
    {"ppo"},
    {"planning"},
    {"train"},
    {"stages"},
    {"explain", "api", "plots", "view"},
    {"cli"},
    {"__init__", "__main__"},
]
TIER = {room: tier for tier, rooms in enumerate(TIERS) for room in rooms}
FOR_ALL = {"errors", "assets", "support"}  # leaves that every room may use
LEAVES = {"dist", "run"}  # may use types and config only
ALLOWED = {
    "errors": set(),
    "assets": set(),
    "support": {"errors", "assets"},
    "config": {"run"} | FOR_ALL,  # a run's config.yaml is a recipe too
    "dist": {"types", "config"} | FOR_ALL,
    "run": {"types"} | FOR_ALL,
    "plots": {"types", "run"} | FOR_ALL,  # draws the files on disk
    "view": {"types", "config", "algo", "run"} | FOR_ALL,  # draws the files on disk
    "algo": {"types", "config"} | FOR_ALL,  # pure maths; of config the sections that name a loss
}


def room_of(file: Path) -> str:
    first = file.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def imported_rooms(source: str) -> Iterator[str]:
    """Rooms of tether that a module imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the arrow"
            if node.module == "tether":
                yield from (alias.name for alias in node.names if alias.name != "__version__")
            elif node.module.startswith("tether."):
                yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("tether."):
                    yield alias.name.split(".")[1]


def may_import(room: str, other: str) -> bool:
    if room == other:
        return True
    if room in ALLOWED:
        return other in ALLOWED[room]
    return other in FOR_ALL | LEAVES or TIER.get(other, len(TIERS)) <= TIER[room]


def arrows() -> set[tuple[str, str, str]]:
    """(file, its room, a room that it imports)."""
    return {
        (str(file.relative_to(SOURCE)), room_of(file), other)
        for file in FILES
        for other in imported_rooms(file.read_text(encoding="utf-8"))
    }


def test_every_import_points_down_the_data_flow():
    found = arrows()
    assert len(found) > 50
    assert not {(f, o) for f, room, o in found if not may_import(room, o)}


def test_no_two_rooms_import_each_other():
    edges = {(room, o) for _, room, o in arrows() if room != o}
    assert not {(a, b) for a, b in edges if (b, a) in edges}


@table(
    ("room", "line", "fine"),
    [
        ("algo", "from tether.config.algorithm import ClipUpdate", True),
        ("algo", "from tether.models import policy", False),
        ("models", "from tether.train.loop import run_loop", False),
        ("run", "def f():\n    import tether.algo.kl", False),
        ("errors", "from tether import assets", False),
        ("view", "from tether.ppo import roles", False),
        ("ppo", "from tether.rollout.local import LocalSampler", True),
        ("cli", "from tether import api", True),
        ("rewards", "from tether.errors import UserError", True),
    ],
)
def test_the_walk_knows_a_wrong_arrow(room, line, fine):
    [other] = imported_rooms(line)
    assert may_import(room, other) is fine


UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "torch.load"}


def unsafe(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in UNSAFE_CALLS:
            found.append(ast.unparse(node.func))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            found += [name for name in names if name.split(".")[0] in UNSAFE_MODULES]
            found += [n for n in names[1:] if f"{names[0]}.{n}" in UNSAFE_CALLS]
    return found


@table("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_no_file_unpickles_evaluates_or_loads_unsafely(file):
    assert unsafe(file.read_text(encoding="utf-8")) == []


@table(
    ("line", "found"),
    [
        ("import pickle", ["pickle"]),
        ("from pickle import loads", ["pickle"]),
        ("from torch import load", ["load"]),
        ("x = eval('1')", ["eval"]),
        ("exec(code)", ["exec"]),
        ("torch.load(path, weights_only=True)", ["torch.load"]),
        ("yaml.load(text, Loader)", ["yaml.load"]),
        ("model.eval()\nyaml.safe_load(text)\nspec.loader.exec_module(m)", []),
    ],
)
def test_the_source_check_knows_what_is_unsafe(line, found):
    assert unsafe(line) == found
