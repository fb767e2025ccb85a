"""`tether recipes` and `tether runs`: what ships, and what is here."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tether.cli.text import score_text, table
from tether.errors import UserError
from tether.run.directory import EVALS, METRICS, RUNS


def recipes() -> None:
    """List the recipes that ship."""
    from tether.recipes import shipped_recipes

    rows = [["recipe", "what it does"]]
    for name, path in shipped_recipes().items():
        first_line = path.read_text(encoding="utf-8").splitlines()[0]
        rows.append([name, first_line.removeprefix("#").strip()])
    print(table(rows, numbers_from=2))


def runs(folder: Annotated[Path, typer.Argument(help="Folder of runs.")] = RUNS) -> None:
    """List the runs in a folder with what they reached."""
    if not folder.is_dir() and folder != RUNS:
        raise UserError(f"{folder} is no folder of runs.")
    from tether.run.reader import find_runs, read_lines

    rows = [["run", "iterations", "score", "KL", "held-out before", "after"]]
    for run in find_runs(folder):
        metrics, evals = read_lines(run / METRICS), read_lines(run / EVALS)
        last = metrics[-1] if metrics else None
        score, kl = (_number(last, name) for name in ("score/mean", "kl/sequence_mean"))
        shares = [_heldout(evaluation) for evaluation in evals]
        before = shares[0] if shares else "–"
        after = shares[-1] if len(shares) > 1 else "–"
        rows.append([str(run), str(len(metrics)), score, kl, before, after])
    if len(rows) == 1:
        print(f"No runs in {folder}/ yet; `tether train` makes one.")
        return
    print(table(rows))


def _number(last: dict[str, Any] | None, name: str) -> str:
    """A stage before PPO has no score, and a run without a reference no KL."""
    return f"{last[name]:.3f}" if last and name in last else "–"


def _heldout(evaluation: dict[str, Any]) -> str:
    """The held-out score; of a stage before PPO, its accuracy or its loss."""
    if "sampled" in evaluation:
        return score_text(evaluation["sampled"]["mean"], evaluation["sampled"]["binary"])
    if "accuracy" in evaluation:
        return f"{evaluation['accuracy']:.1%} right"
    return f"loss {evaluation['loss']:.3f}"
