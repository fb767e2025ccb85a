"""One command on a broken thing, and what can be read off afterwards."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from faults import trials

REFUSED = 2


@dataclass(frozen=True)
class Attempt:
    """How a command ended. `run` is where it would have written a run."""

    code: int
    said: str
    run: Path

    def lines(self, name: str) -> list[dict]:
        path = self.run / name
        return (
            [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []
        )

    @property
    def complaint(self) -> str:
        """What it wrote as its last word."""
        found = [line for line in self.said.splitlines() if line.startswith("tether: ")]
        return found[-1] if found else ""


def attempt(
    folder: Path, *words: str | Path, sabotage: Callable[[], None] | None = None
) -> Attempt:
    """`tether WORDS`, its output kept in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "said.txt"
    code = trials.tether(*words, sabotage=sabotage, log=log)
    return Attempt(code, log.read_text(encoding="utf-8", errors="replace"), folder / "run")


def train(
    folder: Path, recipe: Path, *fields: str | Path, sabotage: Callable[[], None] | None = None
) -> Attempt:
    words = ("train", recipe, "--run.dir", folder / "run", *fields)
    return attempt(folder, *words, sabotage=sabotage)


def no_traceback(tried: Attempt) -> str | None:
    """What is wrong with how it spoke: a refusal is one sentence, and nothing is a traceback."""
    if "Traceback" in tried.said:
        return f"a traceback: {tried.said.splitlines()[-1]}"
    if tried.code not in (0, 1, REFUSED):
        return f"exit code {tried.code}"
    if tried.code != 0 and not tried.complaint:
        return f"exit code {tried.code} without a word"
    return None


def refused(tried: Attempt, *words: str) -> str | None:
    """None if the command ended with exit code 2 and one sentence that holds these words."""
    complaints = tried.said.count("tether: ")
    if tried.code != REFUSED or complaints != 1 or "Traceback" in tried.said:
        return f"not refused: code {tried.code}, {complaints} sentences: {tried.said[-200:]!r}"
    missing = [word for word in words if word not in tried.complaint]
    return f"{missing[0]!r} is not in {tried.complaint!r}" if missing else None


def spoiled_weights(run: Path) -> list[Path]:
    """Saved tensors that hold a number that is not finite."""
    return [
        path
        for path in sorted(run.rglob("*.safetensors"))
        if not all(bool(tensor.isfinite().all()) for tensor in load_file(path).values())
    ]


def null_metrics(tried: Attempt) -> list[str]:
    """Metrics that were not finite: the writer leaves null in their place."""
    return [
        f"{name} of iteration {line['iteration']}"
        for line in tried.lines("metrics.jsonl")
        for name, value in line.items()
        if value is None
    ]


def same_tensors(one: Path, other: Path) -> bool:
    a, b = load_file(one), load_file(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
