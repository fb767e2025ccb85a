"""Solve and train the KL tree in every cell and paste the result into docs/kl.md.

    python scripts/measure_kl_tree.py            # print
    python scripts/measure_kl_tree.py --write    # and paste

Cells that are done are kept in out/kl-tree.json, so a run that was stopped goes on. Exits 1 if a
right cell ends more than 0.02 from the optimum, or another less than 0.06.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from measure import machine, paste

from tether.cli.terminal import table
from tether.explain.kl_tree import CELLS, TreeCell, distances, optimum, solve, train

ROOT = Path(__file__).resolve().parent.parent
DONE = ROOT / "out" / "kl-tree.json"
NEAR, FAR = 0.02, 0.06


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="paste the table into docs/kl.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = json.loads(DONE.read_text()) if DONE.is_file() else {}
    DONE.parent.mkdir(exist_ok=True)
    for cell in CELLS:
        key = f"{cell.place}, {cell.estimator}"
        if key not in found:
            found[key] = measure(cell)
            DONE.write_text(json.dumps(found, indent=1))
            print(key, cell.verdict, found[key], flush=True)
    rows = [["place", "estimator", "solved", "trained, nearest", "farthest", "verdict"]]
    for cell in CELLS:
        solved, trained = found[f"{cell.place}, {cell.estimator}"].values()
        numbers = f"{min(solved):.4f}", f"{min(trained):.4f}", f"{max(trained):.4f}"
        rows.append([cell.place, cell.estimator, *numbers, cell.verdict])
    text = table(rows, numbers_from=2)
    print(text)
    if arguments.write:
        note = "  Total variation to the optimum over four trees; solved: the nearest of them."
        marker = "tree table: made by `python scripts/measure_kl_tree.py --write`"
        paste(ROOT / "docs" / "kl.md", marker, [text, "", note, f"  {machine()}"])
    broken = [cell for cell in CELLS if not as_expected(cell, found)]
    sys.exit(f"Not as derived: {broken}" if broken else 0)


def measure(cell: TreeCell) -> dict[str, list[float]]:
    return {
        "solved": distances(solve(cell), optimum()),
        "trained": distances(train(cell), optimum()),
    }


def as_expected(cell: TreeCell, found: dict[str, dict[str, list[float]]]) -> bool:
    both = [*found[f"{cell.place}, {cell.estimator}"].values()]
    if cell.verdict == "right":
        return all(max(numbers) < NEAR for numbers in both)
    return all(min(numbers) > FAR for numbers in both)


if __name__ == "__main__":
    main()
