"""`tether recipes` and `tether runs`: what ships, and what is here."""

from pathlib import Path
from typing import Annotated

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
        score = f"{last['score/mean']:.3f}" if last else "–"
        kl = f"{last['kl/sequence_mean']:.3f}" if last and "kl/sequence_mean" in last else "–"
        shares = [score_text(e["sampled"]["mean"], e["sampled"]["binary"]) for e in evals]
        before = shares[0] if shares else "–"
        after = shares[-1] if len(shares) > 1 else "–"
        rows.append([str(run), str(len(metrics)), score, kl, before, after])
    if len(rows) == 1:
        print(f"No runs in {folder}/ yet; `tether train` makes one.")
        return
    print(table(rows))
