"""S10: chat templates that loop or grow, sizes that no model has, FIFOs and huge rows in a run.

Every command has a limit of address space and of seconds, far below what the fault would take.
"""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from faults.attempt import attempt, refused
from faults.row import Row, tally
from faults.world import World

SECONDS = 90
MEMORY = 8 << 30  # bytes of address space; importing torch alone takes some of them
PAGE_MEMORY = 1500 << 20  # of a page that shows runs, and does not import torch
ROW_BYTES = 400 << 20

# Asks the page for what it has of the runs in a folder.
ASK = """
import sys
from pathlib import Path
from starlette.testclient import TestClient
from tether.view.server import make_app
from tether.view.run_reader import Folder
page = TestClient(make_app(Folder(Path(sys.argv[1])), "127.0.0.1", 8377), "http://127.0.0.1:8377")
for path in ("", "/odd", "/odd/evals", "/odd/events", "/odd/series?names=x", "/odd/rollouts/0"):
    answer = page.get(f"/api/runs{path}")
    print(answer.status_code, answer.text[:300])
"""


def bounded() -> None:
    """Called in the new process."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(SECONDS)


@dataclass(frozen=True)
class Model:
    """A directory that must be refused with these words."""

    name: str
    words: tuple[str, ...]
    spoil: Callable[[Path], None]

    def attempt(self, world: World, folder: Path) -> str | None:
        shutil.copytree(world.model, folder / "model")
        self.spoil(folder / "model")
        words = ("check", world.recipe, "--model.actor", folder / "model")
        problem = refused(attempt(folder, *words, sabotage=bounded), *self.words)
        return None if problem is None else f"{self.name}: {problem}"


@dataclass(frozen=True)
class Page:
    """A run that the page must show, or say why not."""

    name: str
    spoil: Callable[[Path], None]

    def attempt(self, world: World, folder: Path) -> str | None:
        run = folder / "runs" / "odd"
        (run / "rollouts").mkdir(parents=True)
        (run / "config.yaml").write_text("schema: 1\n")
        (run / "metrics.jsonl").write_text('{"schema": 1, "iteration": 0, "x": 1.0}\n')
        self.spoil(run)
        try:
            asked = subprocess.run(
                [sys.executable, "-c", ASK, str(run.parent)],
                capture_output=True,
                text=True,
                timeout=SECONDS,
                preexec_fn=lambda: resource.setrlimit(
                    resource.RLIMIT_AS, (PAGE_MEMORY, PAGE_MEMORY)
                ),
            )
        except subprocess.TimeoutExpired:
            return f"{self.name}: the page hangs"
        finally:
            shutil.rmtree(run)
        if asked.returncode != 0 or "\n500 " in f"\n{asked.stdout}":
            return f"{self.name}: {(asked.stderr or asked.stdout)[-200:]!r}"
        return None


def row_s10(world: World, folder: Path, tries: int, seed: int) -> Row:
    verdicts = [case.attempt(world, folder / str(i)) for i, case in enumerate(CASES[:tries])]
    return tally("S10", "templates, sizes, FIFOs and rows beyond all bounds", verdicts)


def _template(text: str) -> Callable[[Path], None]:
    return lambda model: (model / "chat_template.jinja").write_text(text) and None


def _config(**changes: object) -> Callable[[Path], None]:
    def spoil(model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, **changes}))

    return spoil


def _fifos(run: Path) -> None:
    for name in ("lock", "timings.jsonl", "evals.jsonl", "events.jsonl", "rollouts/000000.jsonl"):
        os.mkfifo(run / name)


def _huge_row(run: Path) -> None:
    with (run / "rollouts" / "000000.jsonl").open("wb") as file:
        file.write(b'{"schema": 1, "row": 0, "prompt": "')
        for _ in range(ROW_BYTES >> 20):
            file.write(b"x" * (1 << 20))
        file.write(b'"}\n{"schema": 1, "row": 1, "prompt": "b"}\n')


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLES = (
    "{% set ns = namespace(x=messages[0].content) %}"
    "{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
)
CASES = [
    Model("a template that doubles", ("chat template", "MiB of memory"), _template(DOUBLES)),
    Model("a million layers", ("num_hidden_layers",), _config(num_hidden_layers=10**6)),
    Page("FIFOs", _fifos),
    Model("a template that loops", ("chat template", "longer than"), _template(LOOPS)),
    Model(
        "a template that pads",
        ("chat template", "MiB of memory"),
        _template("{{ messages[0].content.center(9 * 10 ** 9) }}"),
    ),
    Model(
        "a template that repeats",
        ("chat template", "characters"),
        _template("{% for i in range(99999) %}{{ 'x' * 100 }}{% endfor %}"),
    ),
    Model(
        "weights that no file holds",
        ("weights by its config.json",),
        _config(num_hidden_layers=100, intermediate_size=1_000_000),
    ),
    Model("no heads", ("num_attention_heads",), _config(num_attention_heads=0)),
    Model("labels without end", ("num_labels",), _config(num_labels=10**9)),
    Page("a row of 400 MB", _huge_row),
]
