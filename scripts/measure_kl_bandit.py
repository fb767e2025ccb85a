"""Train the KL bandit in every cell of the table and paste the result into docs/kl.md.

Exits 1 if a right cell ends more than 0.02 from the optimum, or a wrong one less than 0.05.
"""

import sys
from multiprocessing import get_context
from pathlib import Path

import torch
from measure import machine, paste

from tether.cli.terminal import table
from tether.explain.kl_bandit import CELLS, Cell, distances

DOCS = Path(__file__).resolve().parent.parent / "docs"
NEAR, FAR = 0.02, 0.05


def main() -> None:
    with get_context("spawn").Pool(2, torch.set_num_threads, (1,)) as pool:
        measured = pool.map(distances, CELLS, chunksize=1)
    rows = [["place", "estimator", "nearest", "farthest", "verdict"]]
    for cell, found in zip(CELLS, measured, strict=True):
        verdict = "right" if cell.right else "wrong"
        rows.append([cell.place, cell.estimator, f"{min(found):.4f}", f"{max(found):.4f}", verdict])
    text = table(rows, numbers_from=2)
    print(text)
    lines = [text, "", "  Total variation to the optimum over four bandits.", f"  {machine()}"]
    paste(DOCS / "kl.md", "bandit table: made by `make learn`", lines)
    draw(measured, DOCS / "figures" / "kl-bandit.svg")
    broken = [c for c, found in zip(CELLS, measured, strict=True) if not as_expected(c, found)]
    sys.exit(f"Not as the table says: {broken}" if broken else 0)


def as_expected(cell: Cell, found: list[float]) -> bool:
    return max(found) < NEAR if cell.right else min(found) > FAR


def draw(measured: list[list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "tether"
    import matplotlib.pyplot as plt

    places = list(dict.fromkeys(cell.place for cell in CELLS))
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), sharey=True, layout="constrained")
    for place, axis in zip(places, axes, strict=True):
        inside = [(c, found) for c, found in zip(CELLS, measured, strict=True) if c.place == place]
        for x, (cell, found) in enumerate(inside):
            colour = "C2" if cell.right else "C3"
            axis.plot([x] * len(found), [max(d, 1e-3) for d in found], "o", color=colour, alpha=0.7)
        axis.set_xticks(range(len(inside)), [cell.estimator for cell, _ in inside])
        axis.set(yscale="log", title=f"KL in the {place}")
        axis.axhline(NEAR, color="grey", linewidth=0.8, linestyle="--")
        axis.grid(axis="y", alpha=0.3)
    axes[0].set_ylabel("total variation to the optimum")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
